"""Clusters: what one device computes and holds, and how fast bytes travel between devices. And the files of clusters.

A cluster file is TOML in which every figure has a unit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from sherd.errors import ClusterError, did_you_mean
from sherd.tools.simulate.values import Kind, parsed_toml
from sherd.tools.simulate.work import OpKind


@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices.

    Attributes:
        latency: seconds of one message.
        bandwidth: bytes per second that one device achieves while all others send too.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Timed:
    """An operation that was timed in a training: its size, in the terms of `Op`, and its seconds."""

    flops: int
    nbytes: int
    depth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one rank on CPU cores. All figures as achieved, not as printed by the maker.

    Attributes:
        memory: the bytes of the device.
        library_bytes: bytes that the driver and libraries (context, NCCL, cuBLAS) take in addition to tensors.
        peak_flops: the maker's FLOP/s by the dtype's name; MFU is a share of it.
        flops: the FLOP/s that large matrix products achieve, by the dtype's name.
        attention_share: the share of `flops` that fused attention achieves.
        bandwidth: bytes per second of the memory that large pointwise operations achieve.
        shares: the shares of `bandwidth` that other kinds of operations achieve.
        launch: seconds of the shortest operation on the device.
        host: seconds of the host to queue one operation, when it runs ahead of the device; for a CPU 0.
        overlaps: collectives overlap with compute, as on an accelerator with streams.
        beside: the share of its speed that compute keeps while collectives run.
        skew: seconds by which the slowest rank is later than the mean rank, after all compute for 1 ms. Only for
            devices without `overlaps`: for others the times of collectives include it.
        timed: operations of several sizes, by the operation's name without "aten." and its dtype: `mm.float32`.
    """

    name: str
    memory: int
    library_bytes: int
    peak_flops: dict[str, float]
    flops: dict[str, float]
    attention_share: float
    bandwidth: float
    shares: dict[OpKind, float]
    launch: float
    host: float
    overlaps: bool
    beside: float = 1.0
    skew: float = 0.0
    timed: Mapping[str, tuple[Timed, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal devices.

    Attributes:
        within: the link between devices of a node.
        across: the link between nodes, per device.
        to_host: the link from a device to its host's memory, and back unless there is `from_host`.
        price_per_hour: the price of one device, in `currency`; None: unknown.
        sources: where each figure comes from, by its name.
        optimizer: seconds for each access of an optimizer step to a shard, and bytes per second in addition; None:
            those of a copy.
        host_memory: the bytes of a node's own memory; None: not known.
        host_bandwidth: bytes per second of that memory that the step of one rank achieves while all others step too;
            None: those of `to_host`.
        disk: from a node's memory to a disk, or back, for one rank while all others use it too; None: there is none.
        one_memory: device and host share one memory, so nothing is offloaded.
    """

    name: str
    device: Device
    devices_per_node: int
    within: Link
    across: Link
    to_host: Link
    price_per_hour: float | None
    currency: str
    sources: dict[str, str]
    optimizer: Link | None = None
    host_memory: int | None = None
    from_host: Link | None = None
    host_bandwidth: float | None = None
    disk: Link | None = None
    one_memory: bool = False


# Cluster files

FOLDER = Path(__file__).parent / "clusters"
NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
DECIMAL = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
BINARY = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


@dataclass(frozen=True, slots=True)
class Quantity(Kind):
    """Numbers as texts with a unit. They are written in the last unit that fits, the smaller `units` first."""

    units: Mapping[str, float] = field(default_factory=dict)
    may_be_zero: bool = False


BYTES = Quantity(str, 'bytes, as "80 GiB" or "80 GB"', units=DECIMAL | BINARY)
BANDWIDTH = Quantity(
    str, 'bytes per second, as "3.35 TB/s"', units={f"{unit}/s": by for unit, by in (BINARY | DECIMAL).items()}
)
FLOPS = Quantity(
    str, 'FLOP per second, as "989 TFLOP/s"', units={f"{p}FLOP/s": 1e3**i for i, p in enumerate("MGTP", 2)}
)
SECONDS = Quantity(
    str, 'a time, as "5 us" or "0 s"', units={"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}, may_be_zero=True
)
SHARE = Kind(float, "a number above 0 and up to 1 without a unit, as 0.75", lambda share: 0 < share <= 1)
COUNT = Kind(int, "a whole number from 1 on", lambda count: 0 < count <= sys.maxsize)
FLAG = Kind(bool, "true or false")
TEXT = Kind(str, "a text that is not empty", lambda text: bool(text.strip()))
DECIMAL_BYTES = replace(BYTES, units=DECIMAL)
TIMED = 'a list of texts, as "2 MB: 97 us" or "151 MFLOP, 2 MB, 384 deep: 977 us"'
FLOP = Quantity(
    str, 'FLOP, as "151 MFLOP"', units={f"{p}FLOP": 1e3**i for i, p in enumerate(["", *"kMGTP"])}, may_be_zero=True
)
PRICE = Kind(
    str,
    'a price and the code of its currency, as "2.99 USD"',
    lambda text: bool(re.fullmatch(rf"{NUMBER} [A-Z]{{3}}", text, re.ASCII)),
)

LINKS = ("within", "across", "to_host", "from_host", "disk", "optimizer")
DTYPES = ("bfloat16", "float32", "float16", "tfloat32", "float64")
INTEGERS = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
RARE = ("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FIELDS: dict[str, Kind] = {
    "name": TEXT,
    "devices_per_node": COUNT,
    "host_memory": BYTES,
    "host_bandwidth": BANDWIDTH,
    "one_memory": FLAG,
    "price_per_hour": PRICE,
    "device.name": TEXT,
    "device.memory": BYTES,
    "device.library_bytes": replace(BYTES, may_be_zero=True),
    **{f"device.{table}.{dtype}": FLOPS for table in ("peak_flops", "flops") for dtype in DTYPES},
    "device.attention_share": SHARE,
    "device.bandwidth": BANDWIDTH,
    **{f"device.shares.{kind}": SHARE for kind in ("reduction", "lookup", "copy")},
    "device.launch": SECONDS,
    "device.host": SECONDS,
    "device.overlaps": FLAG,
    "device.beside": SHARE,
    "device.skew": SECONDS,
    **{f"{link}.{name}": kind for link in LINKS for name, kind in (("latency", SECONDS), ("bandwidth", BANDWIDTH))},
}
"""Every field of a cluster file, by its dotted name."""
MAYBE = {f"{link}.{name}" for link in LINKS[3:] for name in ("latency", "bandwidth")}
"""Of a link either both are in a file, or neither."""
TABLE = re.compile(rf"device\.timed\.\w+\.({'|'.join((*DTYPES, *INTEGERS, *RARE))})", re.ASCII)
"""The names of further fields: the times of an operation of a dtype."""
OPTIONAL = {"host_memory", "host_bandwidth", "one_memory", "price_per_hour", "device.beside", "device.skew", *MAYBE}
OPTIONAL |= {name for name in FIELDS if name.rpartition(".")[2] in DTYPES[2:]}


def shipped_clusters() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_cluster(name_or_path: str | Path) -> Cluster:
    """Returns a shipped cluster by its name, or the cluster in a TOML file. Raises ClusterError, in one line."""
    shipped = str(name_or_path) in shipped_clusters()
    path = FOLDER / f"{name_or_path}.toml" if shipped else Path(name_or_path)
    values = _flat(_tree(path))
    sources = {name.removeprefix("sources."): values.pop(name) for name in [*values] if name.startswith("sources.")}
    _require_known(path, values, sources)
    device: dict[str, Any] = {name: {} for name in ("peak_flops", "flops", "shares", "timed")}
    tree: dict[str, Any] = {"device": device, **{link: {} for link in LINKS}}
    for name, value in values.items():
        *tables, leaf = name.split(".")
        if TABLE.fullmatch(name):
            tree["device"]["timed"][name.removeprefix("device.timed.")] = _timed(f"{path}: {name}", value)
            continue
        reduce(getitem, tables, tree)[leaf] = _value(f"{path}: {name}", value, FIELDS[name])
    shares = {OpKind(kind): share for kind, share in tree["device"].pop("shares").items()}
    price, _, tree["currency"] = tree.pop("price_per_hour", "").partition(" ")
    links: dict[str, Any] = {link: Link(**figures) for link in LINKS if (figures := tree.pop(link))}
    read_device = Device(shares=shares, **tree.pop("device"))
    _require_possible(path, values, read_device)
    return Cluster(
        device=read_device,
        **links,
        price_per_hour=float(price) if price else None,
        sources={name: str(_value(f"{path}: sources.{name}", text, TEXT)) for name, text in sources.items()},
        **tree,
    )


def bytes_in(text: str, where: str) -> int:
    """Returns the bytes in a text as "80 GiB". Raises ClusterError, which names `where` it was read."""
    return int(str(_value(where, text, BYTES)))


def _tree(path: Path) -> dict[str, object]:
    try:
        return parsed_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        shipped = shipped_clusters()
        hint = did_you_mean(path.name, shipped, f"expected a file, or one of {', '.join(shipped)}")
        raise ClusterError(f"cannot read the cluster {str(path)!r}: {error.strerror}; {hint}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or no name of a file
        raise ClusterError(f"{str(path)!r} does not parse as TOML: {' '.join(str(error).split())}") from error


def _flat(tree: Mapping[str, object]) -> dict[str, object]:
    """Returns the leaves of `tree` by their dotted names."""
    flat: dict[str, object] = {}
    waiting = [*tree.items()][::-1]
    while waiting:  # a recursion would fail for names with more parts than Python nests calls
        name, value = waiting.pop()
        if type(value) is dict:
            waiting += [(".".join((name, key)), below) for key, below in [*value.items()][::-1]]
        else:
            flat[name] = value
    return flat


def _require_known(path: Path, values: Mapping[str, object], sources: Mapping[str, object]) -> None:
    """Raise ClusterError for a field that is unknown, or missing."""
    for name in values:
        if name not in FIELDS and not TABLE.fullmatch(name):
            hint = did_you_mean(name, FIELDS, f"expected fields are {', '.join(FIELDS)}")
            named = name if len(name) < 80 else f"{name[:77]}..."
            raise ClusterError(f"{path}: unknown field {named!r} = {shortened(values[name])}; {hint}")
    for name in sources:
        if not any(f"{field}.".startswith(f"{name}.") for field in FIELDS):
            raise ClusterError(f"{path}: unknown field {'sources.' + name!r}; expected the name of a field or a table")
    for name, kind in FIELDS.items():
        link = name.rpartition(".")[0]
        is_optional = name in OPTIONAL and not (name in MAYBE and any(each.startswith(f"{link}.") for each in values))
        if name not in values and not is_optional:
            raise ClusterError(f"{path}: {name} is missing; expected {kind.expected}")


def _require_possible(path: Path, values: Mapping[str, object], device: Device) -> None:
    """Raise ClusterError for a figure that is too large compared with another one."""
    if device.library_bytes >= device.memory:
        raise ClusterError(
            f"{path}: device.library_bytes = {shortened(values['device.library_bytes'])}; expected less than "
            f"device.memory, {values['device.memory']}"
        )
    for dtype, achieved in device.flops.items():
        if achieved > device.peak_flops.get(dtype, achieved):
            name, peak = f"device.flops.{dtype}", f"device.peak_flops.{dtype}"
            raise ClusterError(f"{path}: {name} = {shortened(values[name])}; expected at most {peak}, {values[peak]}")


def _value(where: str, value: object, kind: Kind) -> object:
    """Returns `value` in bytes, seconds or the like, or unchanged if it has no unit. Raises ClusterError."""
    is_good, number = not kind.reason(value), float("nan")
    if is_good and isinstance(kind, Quantity):
        match = re.fullmatch(rf"{NUMBER} ?({'|'.join(map(re.escape, kind.units))})", str(value), re.ASCII)
        number = float(match[1]) * kind.units[match[2]] if match else number
        is_good = 0 < number < float("inf") or (kind.may_be_zero and number == 0)
        is_good = is_good and (kind.may_be_zero or "GiB" not in kind.units or number >= 0.5)  # bytes are integers
    if not is_good:
        raise ClusterError(f"{where} = {shortened(value)}; expected {kind.expected}")
    if not isinstance(kind, Quantity):
        return value
    return round(number) if "GiB" in kind.units else number


def _timed(where: str, value: object) -> tuple[Timed, ...]:
    """Returns the operations in a list of texts. Raises ClusterError."""
    texts, operations = value if type(value) is list else [], []
    for text in texts:
        match = re.fullmatch(r"(?:([^,:]+), )?([^,:]+)(?:, (\d{1,18}) deep)?: ([^,:]+)", str(text), re.ASCII)
        if not match:
            break
        flops, nbytes, seconds = (
            float(str(_value(where, part, kind)))
            for part, kind in zip((match[1] or "0 FLOP", match[2], match[4]), (FLOP, BYTES, SECONDS), strict=True)
        )
        operations.append(Timed(round(flops), round(nbytes), int(match[3] or 0), max(seconds, 1e-9)))
    if not operations or len(operations) < len(texts):
        raise ClusterError(f"{where} = {shortened(value)}; expected {TIMED}")
    return tuple(operations)


def _timed_text(timed: Timed) -> str:
    nbytes = _text(timed.nbytes, DECIMAL_BYTES)
    size = f"{_text(timed.flops, FLOP)}, {nbytes}, {timed.depth} deep" if timed.flops else nbytes
    return f"{size}: {_text(timed.seconds, SECONDS)}"


def texts_of(cluster: Cluster) -> dict[str, str]:
    """Returns the figures of `cluster` by their dotted names, each as in a cluster file, without quotes."""
    flat = _flat(asdict(cluster))
    if flat["price_per_hour"] is not None:
        flat["price_per_hour"] = f"{flat['price_per_hour']} {cluster.currency}"
    # Figures without effect are left out: if nothing overlaps with compute, or no rank is late.
    if not cluster.one_memory:
        del flat["one_memory"]
    if not cluster.device.overlaps:
        del flat["device.beside"]
    if cluster.device.overlaps or not cluster.device.skew:
        del flat["device.skew"]
    return {name: _text(flat[name], kind) for name, kind in FIELDS.items() if flat.get(name) is not None}


def _text(value: object, kind: Kind) -> str:
    if isinstance(kind, Quantity):
        number = float(str(value))
        fitting = [unit for unit, by in kind.units.items() if number >= by] or [*kind.units][:1]
        return f"{number / kind.units[fitting[-1]]:.4g} {fitting[-1]}"
    return f"{value:.4g}" if kind is SHARE else str(value).lower() if kind is FLAG else str(value)


def cluster_toml(cluster: Cluster) -> str:
    """Returns the cluster file of `cluster`; figures have four digits."""
    texts = texts_of(cluster)
    bare = (SHARE, COUNT, FLAG)
    lines = [f"{name} = {text if FIELDS[name] in bare else _quoted(text)}" for name, text in texts.items()]
    for name, timed in cluster.device.timed.items():
        lines += [f"device.timed.{name} = [", *(f"    {_quoted(_timed_text(each))}," for each in timed), "]"]
    lines += ["", "[sources]", *(f"{_quoted(name)} = {_quoted(text)}" for name, text in cluster.sources.items())]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Returns a TOML string. What a line cannot hold becomes a blank."""
    clean = "".join(each if each.isprintable() else " " for each in text)
    return '"' + clean.replace("\\", "\\\\").replace('"', '\\"') + '"'
