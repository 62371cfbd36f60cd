"""Use of a trained model, to write or to be judged: the same passes as in training, on one rank or on several."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from sherd import load
from sherd.cli.uses import Asked, asked, pick
from sherd.comm.accelerator import backend
from sherd.comm.objects import do_without_numpy
from sherd.errors import CheckpointError, InputError
from sherd.train.data import Windows, tokens
from sherd.train.device import require_ranks
from sherd.train.parallel import build
from sherd.train.passes import Passes
from sherd.train.rank import grid_of
from sherd.train.ranks import LOOPBACK, group, on_rank_0, together
from sherd.train.sampling import continued, readable

FEW_PARAMETERS = 10_000_000
"""Below so many, several threads take longer for a token than one."""


def be_alone(args: argparse.Namespace, ask: Asked) -> int:
    """Do what is asked in this process, the only rank. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # there is nothing to save, so nothing to tell
    with alone():
        _do(args, ask)
    return 0


def be_rank(args: argparse.Namespace) -> int:
    """Do the same as one of the ranks that `sherd` has started. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with group():
        # A run that still goes on may save in between: rank 0 says which checkpoint is meant.
        checkpoint = on_rank_0(lambda: pick(args.run))
        ask = together(lambda: asked(args, checkpoint))
        together(lambda: require_ranks(dist.get_world_size(), ask.config))
        _do(args, ask)
    return 0


@contextmanager
def alone() -> Iterator[None]:
    """A process group of this process, which needs no launcher and opens no port that others know."""
    do_without_numpy()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    store = dist.HashStore()  # type: ignore[attr-defined] # public, but its stubs do not say so
    dist.init_process_group(backend(), store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _do(args: argparse.Namespace, ask: Asked) -> None:
    model = together(lambda: loaded(ask))
    if args.use == "generate" and dist.get_world_size() == 1 and "OMP_NUM_THREADS" not in os.environ:
        few = sum(each.numel() for each in model.model.parameters()) < FEW_PARAMETERS
        torch.set_num_threads(1 if few else torch.get_num_threads())
    write = _write if dist.get_rank() == 0 else lambda text: True
    if args.use == "generate":
        for piece in generate(model, ask, args):
            if not write(piece) and dist.get_world_size() == 1:
                return  # stdout has no reader; of several ranks the others would wait for this one
    else:
        told = score(model, ask)
        write(json.dumps(told) + "\n" if args.json else _in_words(told))


def loaded(ask: Asked) -> Passes:
    """The passes of the model asked for, with its saved weights. All ranks call it together.

    Raises:
        InputError: the checkpoint is damaged, or of another model than the config's.
    """
    grid, checkpoint = grid_of(ask.config), ask.checkpoint
    model = build(ask.config, grid)
    # From the folder of all, where there is one: it is locked then, and the run cannot remove what is read.
    where, step = (checkpoint.folder.place, checkpoint.step) if checkpoint.folder else (checkpoint.place, None)
    try:
        load(str(where), {"model": model}, step=step, random=False)
    except CheckpointError as error:
        raise InputError(f"{checkpoint} cannot be used: {Exception.__str__(error)}; name an older one") from error
    model.eval()
    return Passes(model, grid)


def generate(model: Passes, ask: Asked, args: argparse.Namespace) -> Iterator[str]:
    """Yields the text asked for, as it is generated."""
    seed = ask.config.seed if args.seed is None else args.seed
    prompt, context = os.fsencode(args.prompt), ask.config.context
    yield from readable(continued(model.logits, context, args.length, prompt, args.temperature, seed))
    yield "\n"


def score(model: Passes, ask: Asked) -> dict[str, str | int | float | None]:
    """Returns how well the model predicts the text, by the names that `sherd eval --json` prints."""
    config = ask.config
    nats = model.judge(Windows(tokens(ask.text), config.context), config.micro_batch)
    return {
        "checkpoint": str(ask.checkpoint),
        "step": ask.checkpoint.step,
        "text": ask.source,
        "bytes": len(ask.text),
        "bits_per_byte": nats / math.log(2),
        "nats_per_token": nats,
        "perplexity": math.exp(nats) if nats < 700 else None,
    }


def _in_words(told: dict[str, str | int | float | None]) -> str:
    perplexity = told["perplexity"]
    return (
        f"{told['bits_per_byte']:.3f} bits per byte  {told['nats_per_token']:.3f} nats per token  perplexity "
        f"{'beyond all numbers' if perplexity is None else f'{perplexity:,.2f}'}\n"
        f"of {told['bytes']:,} bytes, {told['text']}, by {told['checkpoint']}\n"
    )


def _write(text: str) -> bool:
    """Write `text` to stdout, at once and as UTF-8. Returns False if stdout has no reader any more."""
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more when it ends
        return False
    return True
