"""`sherd doctor`: it starts ranks on this machine, or is one of them, and tells what all of them have found."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from sherd.comm.accelerator import accelerator
from sherd.comm.objects import all_gather_objects
from sherd.tools.doctor.bandwidth import of_the_bandwidth, require_free
from sherd.tools.doctor.findings import FAILURE, OK, Finding, as_json, as_table, exit_code
from sherd.tools.doctor.machine import of_the_machine
from sherd.tools.doctor.ranks import of_the_ranks
from sherd.train.launch import start
from sherd.train.ranks import TIMEOUT, meet
from sherd.train.stop import is_rank, leave

MEETING = timedelta(seconds=30)  # by which one rank may be later than another
LIMIT_S = 120.0  # after which a rank that is stuck shows where, and ends
MEASURING_S = 300.0  # the same with --bandwidth, which takes ten seconds
CLONE = "clone the repository, and run make gpu there"
STUCK = (
    "look at stderr for what it was doing; if ranks did not meet, check the interfaces and variables above, and try "
    "--ranks 1"
)


def doctor(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Be a launcher or a rank; returns the exit code. Raises InputError for a file that cannot be written."""
    if args.gpus:
        return _on_gpus(args)
    if not args.into:
        require_free(args.bandwidth)
    if is_rank():
        _be_rank(args)
    num_ranks = args.ranks or (torch.accelerator.device_count() if accelerator() else 2)
    # The launcher gives each rank its share of the cores.
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() else max(1, (os.cpu_count() or 1) // num_ranks)
    findings = list(of_the_machine(num_ranks, threads))
    folder = tempfile.mkdtemp(prefix="sherd-doctor-")
    try:
        code = start(num_ranks, [*words, "--into", folder])
        findings += _merged([_read(Path(folder) / f"{rank}.json") for rank in range(num_ranks)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if code:
        findings.append(Finding("ranks", "end", f"exit code {code}", FAILURE, STUCK))
    return _told(findings, args)


def _on_gpus(args: argparse.Namespace) -> int:
    """Become a program of the bench, in a clone: it measures torch's own FSDP, which sherd does not import."""
    clone = Path(__file__).parents[2]
    if not (clone / "bench" / "gpus").is_dir():
        return _told([Finding("gpus", "program", "not here: it is in sherd's repository", FAILURE, CLONE)], args)
    words = ["--out", str(Path(args.out).resolve())]
    words += ["--ranks", str(args.ranks)] if args.ranks else []
    words += [f"--{name}" for name in ("json", "strict", "quick") if getattr(args, name)]
    os.chdir(clone)
    os.execv(sys.executable, [sys.executable, "-m", "bench.gpus", *words])  # a parent would kill it at Ctrl-C


def _be_rank(args: argparse.Namespace) -> NoReturn:
    """Look at the ranks, and leave: what a launcher has started leaves its findings in a file."""
    faulthandler.dump_traceback_later(MEASURING_S if args.bandwidth else LIMIT_S, exit=True)
    rank, findings = int(os.environ["RANK"]), []
    try:
        if accelerator() is not None:
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        meet(MEETING)
        if not args.into:
            findings += _of_all_machines()
        if args.bandwidth:
            findings += of_the_bandwidth(args.bandwidth, args.scratch)
        else:
            findings += of_the_ranks(TIMEOUT.total_seconds())
        dist.destroy_process_group()
    except Exception as error:
        # torch says in many lines what it was doing.
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        findings.append(Finding("ranks", f"rank {rank}", text, FAILURE, STUCK))
    if args.into:
        (Path(args.into) / f"{rank}.json").write_text(json.dumps([asdict(each) for each in findings]))
        leave(0)
    own = any(each.name == f"rank {rank}" for each in findings)
    leave(_told(findings, args) if rank == 0 or own else exit_code(findings, args.strict))


def _told(findings: Sequence[Finding], args: argparse.Namespace) -> int:
    print(as_json(findings) if args.json else as_table(findings))
    sys.stdout.flush()
    return exit_code(findings, args.strict)


def _of_all_machines() -> list[Finding]:
    """Returns what the first machine is like, and what is wrong with the others."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mine = list(of_the_machine(num_ranks, torch.get_num_threads())) if is_first else []
    return _merged(all_gather_objects(mine, "what the machines are like"))


def _merged(by_rank: Sequence[Sequence[Finding] | None]) -> list[Finding]:
    """Returns the findings of the first rank, and the warnings and failures of the others that the first has not.

    None stands for a rank that left no findings.
    """
    findings: list[Finding] = []
    for rank, theirs in enumerate(by_rank):
        if theirs is None:
            theirs = [Finding("ranks", f"rank {rank}", "it has left no word", FAILURE, STUCK)]
        findings += [each for each in theirs if not rank or (each.verdict != OK and each not in findings)]
    return findings


def _read(path: Path) -> list[Finding] | None:
    try:
        return [Finding(**each) for each in json.loads(path.read_text())]
    except (OSError, ValueError):
        return None
