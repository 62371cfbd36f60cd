"""`torch.sim`: what torch, and those who use it, expect of a device's module. The names are those of `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from simdevice.native import native

Device = torch.device | str | int | None


def index_of(device: Device) -> int:
    """Returns the index of `device`, that of the current one if it names none."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return current_device() if index is None or index < 0 else index


# Devices


def is_available() -> bool:
    return True


is_initialized = is_available


def init() -> None:
    """There is nothing left to do once the device is loaded."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return native().is_forked()


def device_count() -> int:
    return native().device_count()


def current_device() -> int:
    return native().current_device()


def set_device(device: Device) -> None:
    native().set_device(index_of(device))


class device:
    """`with torch.sim.device(1):` makes a device the current one."""

    def __init__(self, device: Device) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


def get_device_name(device: Device = None) -> str:
    return f"simulated accelerator {index_of(device)}"


# Streams and events


class Stream(torch.Stream):
    def __new__(cls, device: Device = None, priority: int = 0, **ids: int) -> Stream:
        if ids:  # torch makes one of a stream that there is
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=torch.device("sim", index_of(device)), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, device="sim", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("sim", index_of(device)))


def default_stream(device: Device = None) -> torch.Stream:
    current = current_stream(device)
    return torch.Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


def synchronize(device: Device = None) -> None:
    torch.accelerator.synchronize(torch.device("sim", index_of(device)))


def on_host_wait(function: Callable[[str], object] | None) -> None:
    """Have `function` called with the cause whenever the host is about to wait: what `sherd.capturable` asks for."""
    native().on_host_wait(function)


# Random numbers


def generator_of(device: Device) -> torch.Generator:
    return native().default_generator(index_of(device))


def manual_seed(seed: int) -> None:
    generator_of(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        generator_of(index).manual_seed(seed)


def initial_seed() -> int:
    return generator_of(None).initial_seed()


def get_rng_state(device: Device = "sim") -> torch.Tensor:
    return generator_of(device).get_state()


def set_rng_state(state: torch.Tensor, device: Device = "sim") -> None:
    generator_of(device).set_state(state)


# Memory


def _of_accelerator(name: str) -> Callable[..., Any]:
    """Returns `torch.accelerator`'s function of that name, asked for a device as torch.cuda's is."""
    return lambda device=None: getattr(torch.accelerator, name)(index_of(device))


memory_stats = _of_accelerator("memory_stats")
memory_allocated = _of_accelerator("memory_allocated")
max_memory_allocated = _of_accelerator("max_memory_allocated")
memory_reserved = _of_accelerator("memory_reserved")
max_memory_reserved = _of_accelerator("max_memory_reserved")
mem_get_info = _of_accelerator("get_memory_info")
reset_peak_memory_stats = _of_accelerator("reset_peak_memory_stats")
empty_cache = torch.accelerator.empty_cache


# Mixed precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True
