"""The small model and the data of the recipes for language models: what Python's names do, as bytes.

Yours go here: let `made` load your model, `PAIRS` be your questions and answers, and `encode` your tokenizer's.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import transformers
from torch.nn.utils.rnn import pad_sequence

from sherd.memory.report import MemoryReport

KINDS = (str, bytes, int, float, list, tuple, dict, set, frozenset, complex, range, type)
PAIRS = [
    (f"{kind.__name__}.{name}: ", member.__doc__.strip().splitlines()[0][:80])
    for kind in KINDS
    for name, member in sorted(vars(kind).items())
    if getattr(member, "__doc__", None)
]
END, WORDS = 0, 256  # the token that ends an answer, and fills up; the number of tokens


def made(name: str | None = None, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The pretrained model `name`, a folder or a name on the hub; without a name a small one with random weights."""
    torch.manual_seed(0)  # the same weights on every rank, before they are cut; adapters too
    if name is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=WORDS, initializer_range=0.1, **sizes)
    return transformers.LlamaForCausalLM(config).to(dtype)


def encode(text: str) -> list[int]:
    return list(text.encode())


def own_part(size: int, step: int) -> list[int]:
    """The numbers of this rank's part of the `size` pairs of a step, which are the same for any number of ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    drawn = torch.randint(len(PAIRS), (size,), generator=torch.Generator().manual_seed(step))
    return drawn[rank * size // num_ranks : (rank + 1) * size // num_ranks].tolist()


def padded(pairs: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, int64 (pairs, length): a target is the token after it, or -100 where none is to be learnt."""
    tokens, targets = [], []
    for question, answer in pairs:
        asked, said = encode(question), [*encode(answer), END]
        tokens.append(torch.tensor([*asked, *said]))
        targets.append(torch.tensor([*[-100] * (len(asked) - 1), *said, -100]))
    return pad_sequence(tokens, True, END), pad_sequence(targets, True, -100)


def kept(*reports: MemoryReport) -> str:
    """What this rank keeps from step to step, by reports of `sherd.memory_report`."""
    nbytes = sum(row.now for each in reports for row in each.rows if row.kind in ("shards", "optimizer state"))
    return f"rank {dist.get_rank()} keeps {nbytes / 2**20:.2f} MiB of shards and optimizer state"
