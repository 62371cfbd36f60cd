"""The plan of a run, said without starting it: `sherd train --dry-run`. It is that of `sherd plan`, as configured."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sherd.cli.plan import TRAINED, as_configured
from sherd.cli.planned_model import trained
from sherd.comm.accelerator import accelerator
from sherd.errors import InputError, SherdError
from sherd.tools.plan.plan import Plan, mesh_of
from sherd.tools.plan.plan import planned as planned_on
from sherd.tools.simulate.cluster import read_cluster
from sherd.tools.simulate.sharded import OPTIMIZERS
from sherd.train.axes import axes_of, usual_ranks
from sherd.train.config import Config
from sherd.train.device import num_devices_of


def plan(config: Config, num_ranks: int | None) -> str:
    """Returns what `config` takes on `num_ranks` ranks, in words; None: as many as would be started here.

    Raises:
        InputError: it does not fit so many ranks, or has a setting that is not planned.
    """
    return str(planned(config, num_ranks or ranks_to_plan(config))) + "\n".join(_of_run(config))


def planned(config: Config, num_ranks: int) -> Plan:
    """Returns the plan of a step of `config` on `num_ranks` ranks.

    The cluster is the shipped "laptop" for a run on the CPU, else "h100". This process must not be in a process group.

    Raises:
        InputError: it does not fit so many ranks, or has a setting that is not planned.
    """
    axes, model = axes_of(config, num_ranks), trained(config)
    num_parameters = sum(each.numel() for each in model.model.parameters())
    cluster = read_cluster("laptop" if device_to_plan(config) == "cpu" else "h100")
    title = f"{num_parameters:,} parameters, {axes}"
    compute_dtype = torch.bfloat16 if config.precision == "bf16" else None
    training = model.training(config.context, OPTIMIZERS[TRAINED[config.optimizer]], compute_dtype)
    settings = as_configured(config, axes)
    try:
        return planned_on(training, cluster, mesh_of(vars(axes)), config.batch, None, settings, title)
    except SherdError as error:
        raise InputError(" ".join(str(error).split())) from error


def ranks_to_plan(config: Config) -> int:
    """Returns the number of ranks that would be started, maybe for a device that is not here."""
    device = device_to_plan(config)
    return usual_ranks(config, num_devices_of(device if device == accelerator() else "cpu") or 2)


def device_to_plan(config: Config) -> str:
    """Returns `cpu` or the type of the accelerator of a run that is only planned, which need not be here."""
    return (accelerator() or "cpu") if config.device == "auto" else config.device


def _of_run(config: Config) -> Iterator[str]:
    """Yields lines on all steps of the run."""
    steps, tokens = config.steps, config.batch * config.context
    minutes = f"as many steps as {config.minutes:g} minutes allow"
    yield f"\nrun         {f'{steps:,} steps = {steps * tokens:,} tokens' if steps else minutes}"
    yield ""
