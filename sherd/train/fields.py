"""The fields of a config in writing: for `--help`, for docs/look_up/config.md, and with a run's values as TOML."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from sherd.train.config import FREE, SECTIONS, Config, InputError

__all__ = ["describe", "page", "toml", "write_config"]


def describe() -> str:
    """Every field with its default and what it is, for `--help`."""
    lines = []
    for name, section in SECTIONS.items():
        lines.append(f"[{name}]")
        for f in dataclasses.fields(section):
            rule = f" ({rule})" if (rule := f.metadata["rule"]) else ""
            lines.append(f"  {f.name + ' = ' + json.dumps(f.default):24} {f.metadata['about']}{rule}")
    return "\n".join(lines)


def page() -> str:
    """The tables of docs/look_up/config.md: one a section, with a row per field."""
    return "\n".join(_tables())


def _tables() -> Iterator[str]:
    for name, section in SECTIONS.items():
        yield f"## [{name}]\n\n{section.__doc__}\n"
        yield "| field | default | meaning | limits |\n|---|---|---|---|"
        for f in dataclasses.fields(section):
            mark = "" if name == "shard" or f"{name}.{f.name}" in FREE else " \\*"
            yield f"| `{f.name}`{mark} | `{_value(f.default)}` | {f.metadata['about']} | {f.metadata['rule']} |"
        yield ""


def toml(config: Config) -> str:
    """`config` as TOML that `--config` takes. It names no `run.out`: a run that is started with it gets a new one."""
    lines = []
    for section, values in config.tree().items():
        lines += ["", f"[{section}]"]
        lines += [f"{k} = {_value(v)}" for k, v in values.items() if (section, k) != ("run", "out")]
    return "\n".join(lines[1:]) + "\n"


def _value(value: object) -> str:
    # JSON's strings, numbers and bools are TOML's too, but for one character, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def write_config(config: Config, out: Path) -> None:
    """Keep `config` as config.toml in `out`.

    Raises:
        InputError: it cannot be written.
    """
    about = "# The config of this run: `sherd train --config` with this file starts another one like it.\n\n"
    try:
        (out / "config.toml").write_text(about + toml(config), encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}; choose another --out") from error


if __name__ == "__main__":  # for whoever has changed a field: what stands between the marks of docs/look_up/config.md
    print(page(), end="")
