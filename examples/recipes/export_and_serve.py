"""Export and serve: a model is trained on shards, saved for Hugging Face, and answers over HTTP in one plain process.

    torchrun --nproc-per-node 2 examples/recipes/export_and_serve.py --out out
    python examples/recipes/export_and_serve.py --serve out

Requests are those of vLLM's server: `vllm serve out` may take the place of the second command.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from pydoc_data import topics  # Python's manual, which comes with it
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import sherd

ARGUMENTS = {"steps": 60, "batch": 16, "context": 64, "words": 512, "width": 64, "layers": 2, "heads": 4}


def tokenizer_of(text: str, num_words: int) -> PreTrainedTokenizerFast:
    """Learnt from the text on rank 0; all ranks get that one."""
    learner = ByteLevelBPETokenizer()
    if dist.get_rank() == 0:
        learner.train_from_iterator(
            text.splitlines(keepends=True), num_words, show_progress=False, special_tokens=["</s>"]
        )
    dist.broadcast_object_list(learnt := [learner.to_str()])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(learnt[0]), eos_token="</s>")


def train(args: argparse.Namespace) -> None:
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch}: expected a multiple of the {world} ranks")
    text = args.data.read_text() if args.data else "".join(topics.topics.values())
    # To go on with a model of others: AutoTokenizer.from_pretrained(NAME), AutoModelForCausalLM.from_pretrained(NAME).
    tokenizer = tokenizer_of(text, args.words)
    torch.manual_seed(0)  # the same weights on every rank, before they are cut
    sizes = {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_hidden_layers": args.layers}
    heads = {"num_attention_heads": args.heads, "max_position_embeddings": 4 * args.context}
    config = LlamaConfig(vocab_size=args.words, bos_token_id=None, eos_token_id=0, **sizes, **heads)
    model = sherd.auto_shard(AutoModelForCausalLM.from_config(config))
    optimizer, device = torch.optim.AdamW(model.parameters(), lr=3e-3), next(model.parameters()).device

    tokens = torch.tensor(tokenizer(text)["input_ids"])
    for step in range(args.steps + 1):
        starts = torch.randint(
            len(tokens) - args.context, (args.batch, 1), generator=torch.Generator().manual_seed(step)
        )
        own = tokens[starts.chunk(world)[rank] + torch.arange(args.context)].to(device)
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            dist.all_reduce(mean := loss.detach() / world)
            if rank == 0:
                print(f"step {step:3}  loss {mean:.3f}", flush=True)
    sherd.save_pretrained(model, args.out, dtype=getattr(torch, args.dtype), tokenizer=tokenizer)
    if args.prompt:
        sherd.register_fsdp_forward_method(model, "generate")  # on all ranks, which gather for it
        said = completed(args.prompt, 20, model.eval(), tokenizer)
        if rank == 0:
            print(f"{args.prompt} ... {said}")
    dist.destroy_process_group()


@torch.inference_mode()
def completed(prompt: str, max_tokens: int, model: Any, tokenizer: Any) -> str:
    """The likeliest continuation."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def serve(folder: str, port: int) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    class Completions(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                text = completed(asked["prompt"], asked.get("max_tokens", 20), model, tokenizer)
            except (ValueError, KeyError, TypeError) as error:
                return self.send_error(400, f'expected {{"prompt": "...", "max_tokens": 20}}: {error!r}')
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"text": text}]}).encode())

    server = HTTPServer(("127.0.0.1", port), Completions)
    print(f"answers at http://127.0.0.1:{server.server_port}/v1/completions", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text file; default: Python's manual")
    parser.add_argument("--out", default="out", help="the folder for Hugging Face")
    parser.add_argument("--dtype", default="float32", help="of the weights in it")
    parser.add_argument("--prompt", help="print what the model says to this, at the end of the training")
    parser.add_argument("--serve", metavar="FOLDER", help="train nothing, and answer with the model in this folder")
    parser.add_argument("--port", type=int, default=8000)
    for name, default in ARGUMENTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    serve(args.serve, args.port) if args.serve else train(args)
