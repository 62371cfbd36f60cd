"""The command `sherd plan`. Loads torch only once its words can be used."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import math
import re
import textwrap
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sherd.cli.options import add_command, add_fields, flag_of, not_written, reader, word_of
from sherd.cli.terminal import escaped
from sherd.errors import InputError, SherdError
from sherd.tools.report.page import page, require_plotly
from sherd.tools.simulate.cluster import Cluster, bytes_in, read_cluster, shipped_clusters
from sherd.tools.simulate.search import garbage_left
from sherd.tools.simulate.settings import AXES, COSTS, KINDS, STRATEGIES, Settings
from sherd.tools.simulate.sharded import OPTIMIZERS
from sherd.tools.simulate.values import at_least
from sherd.train.axes import Axes, axes_of, sizes_in
from sherd.train.codes import BAD_INPUT, NO_ROOM
from sherd.train.config import FIELDS, Config

if TYPE_CHECKING:
    from sherd.cli.planned_model import Planned
    from sherd.tools.plan.plan import Plan

ABOUT = "tell what training a model takes: memory, time, price, and which settings are the fastest that fit"
DOES_NOT_FIT = 1
USUAL = 2048
"""The tokens of a sample, if neither words nor model say."""
CODES = (
    f"exit code: 0, it fits, or is tight; {DOES_NOT_FIT}, it does not fit; {BAD_INPUT}, it cannot be planned; "
    f"{NO_ROOM}, a file cannot be written"
)
SHARED = [name for name in KINDS if name in FIELDS]
"""The settings that a config of `sherd train` has too."""
AS_TRAINED = {each.name: each.default for each in fields(Settings) if each.name in KINDS.keys() - SHARED}
"""Settings that `sherd train` leaves as `fully_shard` has them."""
TRAINED = {"adamw": "adamw-fused", "muon": "muon"}
"""The optimizers of sherd train, by the names in its configs."""


def add_plan(commands: Any) -> None:
    p = add_command(commands, "plan", ABOUT, CODES, do=run)
    p.add_argument(
        "model",
        metavar="MODEL",
        help="package.module:function or file.py:function that returns a module, (module, batch) or (module, batch, "
        "loss); a config.json of Hugging Face; a config of sherd train; or a run's folder, planned as configured",
    )
    p.add_argument(
        "--as-configured", action="store_true", help="take mesh and settings of sherd train's config, choose nothing"
    )
    names = f"{', '.join(shipped_clusters())}, or a file; of several the cheapest comes first"
    p.add_argument("--cluster", nargs="+", default=["h100"], metavar="NAME", help=names)
    count = reader(at_least(1))
    p.add_argument("--ranks", type=count, metavar="N", help="devices; unless told, those of one node")
    p.add_argument("--nodes", type=count, metavar="N", help="instead of --ranks: all devices of so many nodes")
    p.add_argument("--mesh", metavar="AXES", help="as replicate=2,dp=8,tp=4, and no other; unless told, the best one")
    said = "of a step, over all ranks; unless told, one per rank; several are planned one by one"
    p.add_argument("--samples", nargs="+", type=count, metavar="N", help=said)
    p.add_argument("--tokens", type=_count, metavar="N", help="of the full run, as 1.4T: tell its days and its price")
    p.add_argument("--context", type=count, metavar="N", help="tokens of a sample; unless told, the model's own")
    p.add_argument("--precision", choices=("bf16", "fp32"), help="of forward and backward; bf16 unless a config tells")
    p.add_argument("--optimizer", choices=OPTIMIZERS, help="adamw-fused unless told, or the config's")
    p.add_argument(
        "--limit", metavar="SIZE", help='memory of a device, as "60 GiB"; unless told, 95 %% of an accelerator'
    )
    chosen = p.add_argument_group("settings that are chosen unless told")
    add_fields(chosen, (each for each in fields(Settings) if each.name in KINDS))
    said = f"as int8,bf16: formats that may be chosen for gathers and reductions, of {', '.join(COSTS)}"
    p.add_argument("--formats", type=lambda word: word.split(","), default=[], metavar="NAMES", help=said)
    p.add_argument("--json", action="store_true", help="print one line of JSON")
    p.add_argument("--report", type=Path, metavar="FILE", help="write a page of HTML")
    p.add_argument("--timeline", type=Path, metavar="FILE", help="write the step for sherd report and sherd compare")
    p.add_argument("--write", type=Path, metavar="FILE", help="write a config for sherd train, if MODEL is one")


def run(args: argparse.Namespace) -> int:
    """Print the plan; returns the exit code. Raises InputError, also for what others raise."""
    try:
        with garbage_left():
            return _run(args)
    except InputError:
        raise
    except SherdError as error:
        raise InputError(" ".join(str(error).split())) from error
    finally:
        atexit.register(gc.freeze)  # a process that ends looks through all that there is once more


def _run(args: argparse.Namespace) -> int:
    plans, model = _plans(args)
    made, notes = plans[0], _notes(args, model)
    if args.json:
        several = [_as_json(each, args.tokens) | {"notes": notes} for each in plans]
        print(json.dumps({"plans": several} if len(several) > 1 else several[0]))
    else:
        from sherd.tools.plan.in_words import compared, run_of

        rows = compared(((each.prediction, each.settings, each.answer) for each in plans), args.tokens)
        table = [*(f"{row}\n" for row in rows), "\nthe first of them\n\n"] if len(plans) > 1 else []
        run = [] if args.tokens is None else [f"\nrun         {run_of(made.prediction, args.tokens)}\n"]
        lines = (
            *table,
            str(made),
            *run,
            _next(made, model, args.context or model.context or USUAL),
            *(f"\nnote        {note}\n" for note in notes),
        )
        print(*map(escaped, lines), sep="", end="")
    try:
        _write(args, made, model)
    except OSError as error:
        return not_written("plan", error)
    return 0 if made.fits else DOES_NOT_FIT


def _next(made: Plan, model: Planned, context: int) -> str:
    """Returns what makes the training that was planned."""
    if model.origin is None or not made.fits:
        return ""
    from sherd.tools.plan.in_words import program_of

    device_type = "cuda" if made.prediction.cluster.device.overlaps else "cpu"
    batch = model.training(context, made.optimizer, made.compute_dtype).batch(made.settings.micro_batch)
    how = (made.settings, made.compute_dtype, made.optimizer_name, device_type)
    program = "\n".join(program_of(*how, model.origin, model.model, batch))
    return f"\na program that trains so, for torchrun\n{textwrap.indent(program, '  ')}\n"


def _plans(args: argparse.Namespace) -> tuple[list[Plan], Planned]:
    """Returns a plan for each cluster and number of samples: those that fit first, and of these the cheapest."""
    if None not in (args.nodes, args.ranks):
        raise InputError(f"--nodes {args.nodes}: --ranks is there too; leave one of them out")
    limit = None if args.limit is None else bytes_in(args.limit, "--limit")
    if limit == 0:
        raise InputError(f"--limit {args.limit}: expected a byte at least")
    if args.report is not None:
        require_plotly()
    clusters = [read_cluster(name) for name in args.cluster]
    from sherd.cli.planned_model import model_from

    is_run = Path(args.model).is_dir()
    model = model_from(f"{args.model}/config.toml" if is_run else args.model)
    if args.tokens is not None and not model.reads_tokens:
        raise InputError(f"--tokens: samples of {args.model} have no tokens; leave it out")
    plans = []
    for cluster, samples in product(clusters, args.samples or [None]):
        ranks = args.ranks if args.nodes is None else args.nodes * cluster.devices_per_node
        own = argparse.Namespace(**(vars(args) | {"samples": samples, "ranks": ranks, "limit": limit}))
        plans.append(_plan(own, cluster, model, args.as_configured or is_run))

    def price(plan: Plan) -> tuple[bool, float, float]:
        found = plan.prediction
        cost = found.cost_per_million_samples
        return not plan.fits, math.inf if cost is None else cost, -found.samples_per_second

    return sorted(plans, key=price), model


def _plan(args: argparse.Namespace, cluster: Cluster, model: Planned, as_is: bool) -> Plan:
    import torch

    from sherd.tools.plan.plan import mesh_of, planned
    from sherd.tools.plan.planner import ArgumentError

    try:
        mesh = mesh_of(_mesh(args, cluster.devices_per_node))
    except ArgumentError as error:
        raise InputError(f"--mesh {args.mesh}: {error.said}") from error
    config = model.config
    given = {name: value for name in KINDS if (value := getattr(args, name)) is not None}
    if as_is:
        if config is None:
            raise InputError("--as-configured needs a MODEL that is a config of sherd train, or a run's folder")
        ranks = args.ranks or cluster.devices_per_node
        axes = axes_of(config, ranks) if args.mesh is None else Axes(**_mesh(args, ranks))  # type: ignore[arg-type]
        mesh, given = mesh_of(vars(axes)), as_configured(config, axes) | given
    if args.write is not None and config is None:
        raise InputError("--write needs a MODEL that is a config of sherd train")
    stepped = args.optimizer or TRAINED[config.optimizer if config else "adamw"]
    if args.write is not None and stepped not in TRAINED.values():
        said = f"--write is for sherd train, which steps {' or '.join(TRAINED.values())}"
        raise InputError(f"--optimizer {stepped}: {said}")
    if args.write is not None:
        for name, only in AS_TRAINED.items():
            if given.setdefault(name, only) != only:
                raise InputError(f"{flag_of(name)} {given[name]}: --write is for sherd train, which has {only}")
    if args.context is not None:
        _require_context(args.model, model, args.context)
        if config is not None:
            Config.of(config.tree(), {"context": args.context})
    context = args.context or model.context or USUAL
    precision = args.precision or (config.precision if config else "bf16")
    dtype = torch.bfloat16 if precision == "bf16" else None
    num_data = mesh if isinstance(mesh, int) else mesh.num_data
    training = model.training(context, OPTIMIZERS[stepped], dtype)
    samples = args.samples or (config.batch if config else training.samples * num_data)
    try:
        return planned(training, cluster, mesh, samples, args.limit, given, Path(args.model).name, args.formats)
    except ArgumentError as error:
        flag, value = flag_of(error.argument), getattr(args, error.argument, None)
        if value is None and error.argument == "mesh":
            flag, value = "--ranks", args.ranks or mesh
        elif value is None:
            flag, value = ("batch", samples) if config else (flag, "")
        raise InputError(f"{flag} {word_of(value)}: {error.said}") from error


def _require_context(name: str, model: Planned, context: int) -> None:
    """Raise InputError if samples of `model` cannot have so many tokens."""
    if not model.reads_tokens:
        raise InputError(f"--context {context}: samples of {name} have no tokens to number; leave it out")
    if model.context and context > model.context and model.has_positions:
        raise InputError(
            f"--context {context}: {name} has a table of {model.context} positions, and none for more tokens; take at "
            f"most {model.context}, or change the config"
        )


def _notes(args: argparse.Namespace, model: Planned) -> list[str]:
    """Returns what is planned as it was asked for, and is hardly meant."""
    most = None if model.config else model.context
    if most is None or args.context is None or args.context <= most:
        return []
    return [f"{args.context:,} tokens in a sample are more than the {most:,} that the config says the model is for"]


def _count(word: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?) ?([kMBT]?)", word.replace(",", ""), re.ASCII)
    count = float(match[1]) * 1e3 ** " kMBT".index(match[2] or " ") if match else 0.0
    if not count:
        raise argparse.ArgumentTypeError(f"{word!r}: expected a number of tokens, as 300B or 1.4T")
    return count


def as_configured(config: Config, axes: Axes) -> dict[str, Any]:
    """Returns the settings of a run of sherd train. Raises InputError if a plan has none like them."""
    if config.strategy not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise InputError(f"strategy = {config.strategy} is not planned; known are {known}")
    return {
        **{name: getattr(config, name) for name in SHARED if name != "recompute" or config.checkpointing},
        **AS_TRAINED,
        "reshard": config.reshard and STRATEGIES[config.strategy] == "auto",
        "micro_batch": config.split(axes.num_data)[0],
    }


def _mesh(args: argparse.Namespace, per_node: int) -> int | dict[str, int]:
    if args.mesh is None:
        return per_node if args.ranks is None else int(args.ranks)
    sizes = sizes_in(args.mesh, AXES, "sherd plan")
    num_ranks = math.prod(sizes.values())
    if args.ranks not in (None, num_ranks):
        raise InputError(f"--mesh {args.mesh} has {num_ranks} ranks, and --ranks is {args.ranks}")
    return sizes


# What is written


def _as_json(made: Plan, tokens: float | None) -> dict[str, Any]:
    prediction, peak, published = made.prediction, made.prediction.timeline.peak, made.room.published
    run = {"days": prediction.days(tokens), "price": prediction.price(tokens)} if tokens else {}
    return {
        "cluster": prediction.cluster.name,
        "samples": made.settings.num_samples,
        "fits": made.fits,
        "answer": made.answer.value,
        "published": None if published is None else published._asdict(),
        "settings": asdict(made.settings),
        "speedups": dict(made.speedups),
        "step_seconds": prediction.timeline.seconds,
        "exposed_seconds": prediction.timeline.exposed,
        "tokens_per_second": prediction.tokens_per_second,
        "samples_per_second": prediction.samples_per_second,
        "mfu": prediction.mfu,
        "peak": {"nbytes": peak.nbytes, "moment": peak.moment, "by_kind": peak.by_kind},
        "reserved_bytes": prediction.reserved_bytes,
        "driver_bytes": prediction.driver_bytes,
        "limit_bytes": made.limit,
        "host_bytes": prediction.outcome.host_bytes,
        "host_limit_bytes": made.room.host,
        "host_bytes_of_rank": dict(prediction.in_host),
        "disk_bytes_of_rank": prediction.on_disk,
        "sent_bytes": prediction.sent,
        "cost_per_million_tokens": prediction.cost_per_million_tokens,
        "cost_per_million_samples": prediction.cost_per_million_samples,
        **run,
        "currency": prediction.cluster.currency,
        "advice": [asdict(each) for each in made.advice],
    }


def _write(args: argparse.Namespace, made: Plan, model: Planned) -> None:
    if args.report is not None:
        args.report.write_text(page([made.timeline], made.search, made.advice), encoding="utf-8")
    if args.timeline is not None:
        from sherd.tools.plan.files import to_json

        args.timeline.write_text(to_json(made.timeline), encoding="utf-8")
    if args.write is not None:
        from sherd.train.config import toml

        assert model.config is not None, "it was required"
        context = args.context or model.config.context
        args.write.write_text(toml(configured(model.config, made, context)), encoding="utf-8")


def configured(config: Config, made: Plan, context: int) -> Config:
    """Returns `config` with the settings of a plan for samples of `context` tokens."""
    settings, mesh = made.settings, made.settings.mesh
    axes = [f"{name}={size}" for name, field in AXES.items() if (size := getattr(mesh, field)) > 1]
    planned = {
        **{name: getattr(settings, name) for name in SHARED},
        "context": context,
        "mesh": ",".join(axes) or "dp=1",
        "precision": "fp32" if made.compute_dtype is None else "bf16",
        "optimizer": "muon" if made.optimizer.is_muon else "adamw",
        "batch": settings.num_samples,
    }
    return Config.of(config.tree(), planned)
