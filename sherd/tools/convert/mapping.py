"""Rules that rename and reshape the tensors of a model: presets or read from JSON, followed forwards and backwards.

A pattern is a name with holes: "layers.{i}.attention.wq.weight". A hole `{i}` stands for the digits of a number, `{*x}`
for any text. All patterns of a rule have the same holes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sherd.errors import CheckpointError
from sherd.storage.manifest import in_brief, read_json
from sherd.storage.places import read_file

KINDS = ("rename", "transpose", "permute", "merge", "split", "stack", "unstack", "tie", "drop")
_HOLE = re.compile(r"\{(\*?)([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Rule:
    """A change of the tensors with certain names.

    Args:
        kind: one of KINDS.
        of: the patterns of the names that the rule takes.
        to: the patterns of the names that the rule makes; none for "drop".
        dim: of "merge" and "split".
        ratio: the relative sizes of the parts of "merge" and "split"; empty: they are equal.
        heads: of "permute": the number of heads whose rotary halves are interleaved.
        backwards: of "permute": take the halves apart again.
        regex: of "rename": `of` is a regular expression, and `to` its replacement.
        back: the (expression, replacement) that undoes a regular expression.
    """

    kind: str
    of: tuple[str, ...]
    to: tuple[str, ...] = ()
    dim: int = 0
    ratio: tuple[int, ...] = ()
    heads: int = 0
    backwards: bool = False
    regex: bool = False
    back: tuple[str, ...] = ()

    def reverse(self) -> Rule | None:
        """Returns the rule that undoes this one; None for "drop", which nothing undoes.

        Raises:
            CheckpointError: a regular expression has no `back`.
        """
        if self.kind == "drop":
            return None
        if self.kind == "permute":
            return replace(self, backwards=not self.backwards)
        if self.regex:
            if len(self.back) != 2:
                raise CheckpointError(f'the rule that renames {self.of[0]} needs "back", to be followed backwards')
            return replace(self, of=self.back[:1], to=self.back[1:], back=(*self.of, *self.to))
        if self.kind in ("tie", "untie"):
            return replace(self, kind="untie" if self.kind == "tie" else "tie")
        other = {"merge": "split", "split": "merge", "stack": "unstack", "unstack": "stack"}
        return replace(self, kind=other.get(self.kind, self.kind), of=self.to, to=self.of)


def matcher(pattern: str) -> re.Pattern[str]:
    """Returns the expression that matches the names that `pattern` stands for, with a group for each hole."""
    parts, at = [], 0
    for hole in _HOLE.finditer(pattern):
        any_text, name = hole.groups()
        repeated = f"(?P={name})"
        parts.append(re.escape(pattern[at : hole.start()]))
        seen = any(part.startswith(f"(?P<{name}>") for part in parts)
        parts.append(repeated if seen else f"(?P<{name}>{'.+' if any_text else '[0-9]+'})")
        at = hole.end()
    return re.compile("".join([*parts, re.escape(pattern[at:])]))


def filled(pattern: str, holes: Mapping[str, str]) -> str:
    return _HOLE.sub(lambda hole: holes[hole[2]], pattern)


def rules_of(name: str, numbers: Mapping[str, int], reverse: bool = False) -> list[Rule]:
    """Returns the rules of the preset `name`, or of the JSON file; with `reverse` the rules that undo them.

    `numbers` are the values of "$heads" and others in the rules.

    Raises:
        CheckpointError: there is no such file, a rule is malformed, a number is missing, or a rule cannot be undone.
    """
    entries: Any
    if name in PRESETS:
        entries, where = PRESETS[name], f"the preset {name}"
    else:
        where = name
        try:
            entries = read_json(Path(name).read_bytes(), name).get("rules")
        except OSError as error:
            raise CheckpointError(
                f"{name} cannot be read ({error.strerror or error}), and is none of the presets {', '.join(PRESETS)}"
            ) from None
    if not isinstance(entries, list | tuple):
        raise CheckpointError(f'{where} has no list called "rules"')
    rules = [_rule(entry, numbers, f"{where}, rule {at + 1}") for at, entry in enumerate(entries)]
    if reverse:
        return [undone for rule in reversed(rules) if (undone := rule.reverse()) is not None]
    return rules


def _rule(entry: Any, numbers: Mapping[str, int], where: str) -> Rule:
    known = {*KINDS, "to", "dim", "ratio", "heads", "inverse", "regex", "back"}
    if not isinstance(entry, Mapping) or not set(entry) <= known:
        raise CheckpointError(f"{where} is {in_brief(entry)}, which has other entries than {', '.join(sorted(known))}")
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1:
        raise CheckpointError(f"{where} should have one of {', '.join(KINDS)}")
    (kind,) = kinds
    of = _texts(entry[kind], where)
    to = _texts(entry.get("to", []), where)
    needs = {"merge": (2, 1), "split": (1, 2), "drop": (1, 0), "transpose": (1, 0), "permute": (1, 0)}.get(kind, (1, 1))
    if (len(of) != needs[0] and not (kind == "merge" and len(of) > 1)) or (
        len(to) != needs[1] and not (kind == "split" and len(to) > 1)
    ):
        raise CheckpointError(f"{where} has {len(of)} names for {kind}, and {len(to)} to make")
    rule = Rule(
        kind,
        of,
        to or (of if kind in ("transpose", "permute") else ()),
        _number(entry.get("dim", 0), numbers, where),
        tuple(_number(part, numbers, where) for part in entry.get("ratio", ())),
        _number(entry.get("heads", 0), numbers, where),
        bool(entry.get("inverse", False)),
        bool(entry.get("regex", False)),
        _texts(entry.get("back", []), where),
    )
    if kind in ("split", "merge") and rule.ratio and len(rule.ratio) != max(len(of), len(to)):
        raise CheckpointError(f"{where}: ratio has {len(rule.ratio)} numbers for {max(len(of), len(to))} parts")
    if kind == "permute" and rule.heads < 1:
        raise CheckpointError(f"{where} needs heads, a number above 0")
    _require_patterns(rule, where)
    return rule


def _require_patterns(rule: Rule, where: str) -> None:
    if rule.regex:
        try:
            for pattern in (*rule.of, *rule.back[:1]):
                re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{where} has no regular expression: {error}") from None
        return
    of, to = (
        [{hole[2] for hole in _HOLE.finditer(pattern)} for pattern in patterns] for patterns in (rule.of, rule.to)
    )
    stacked = {"stack": (rule.of, of), "unstack": (rule.to, to)}.get(rule.kind)
    if stacked is not None:
        (pattern,), (holes,) = stacked
        if "{expert}" not in pattern:
            raise CheckpointError(f"{where}: {pattern} should have the hole {{expert}}")
        holes.discard("expert")
    if any(holes != of[0] for holes in (*of, *to)):
        raise CheckpointError(f"{where}: its names have different holes, {', '.join((*rule.of, *rule.to))}")


def _texts(value: Any, where: str) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise CheckpointError(f"{where} has {in_brief(value)} where names are expected")
    return tuple(texts)


def _number(value: Any, numbers: Mapping[str, int], where: str) -> int:
    if isinstance(value, str) and value.startswith("$"):
        if value[1:] not in numbers:
            raise CheckpointError(
                f"{where} needs {value[1:]}, which no config.json next to the source says; --set {value[1:]}=N"
            )
        return numbers[value[1:]]
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{where} has {in_brief(value)} where a number is expected")
    return value


def numbers_of(path: Path) -> dict[str, int]:
    """Returns the numbers of a Hugging Face config.json in or next to `path`, as rules name them: heads, kv_heads."""
    for folder in (path, path.parent):
        try:
            config = json.loads(read_file(folder / "config.json"))
            heads = config.get("num_attention_heads", config.get("n_head"))
            numbers = {"heads": heads, "kv_heads": config.get("num_key_value_heads", heads)}
        except (OSError, ValueError, AttributeError, CheckpointError):
            continue
        return {name: value for name, value in numbers.items() if type(value) is int}
    return {}


def each_match(rule: Rule, names: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the names that match the first pattern of `rule`, with the texts in its holes."""
    first = matcher(rule.of[0])
    for name in names:
        match = first.fullmatch(name)
        if match:
            yield name, match.groupdict()


# Presets

Entries = tuple[Mapping[str, Any], ...]


def _renamed(names: Mapping[str, str]) -> Entries:
    return tuple({"rename": of, "to": to} for of, to in names.items())


_HF, _OURS = "model.layers.{i}.", "blocks.{i}."
_AROUND = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    f"{_HF}input_layernorm.weight": f"{_OURS}attention_norm.weight",
    f"{_HF}post_attention_layernorm.weight": f"{_OURS}feed_forward_norm.weight",
}
_ATTENTION = {
    f"{_HF}self_attn.{theirs}_proj.{kind}": f"{_OURS}attention.{ours}.{kind}"
    for theirs, ours in {"q": "query", "k": "key", "v": "value", "o": "out"}.items()
    for kind in ("weight", "bias")
}
_NORMS = {
    f"{_HF}self_attn.{theirs}_norm.weight": f"{_OURS}attention.{ours}_norm.weight"
    for theirs, ours in {"q": "query", "k": "key"}.items()
}
_DENSE = {
    f"{_HF}mlp.{each}_proj.{kind}": f"{_OURS}feed_forward.{each}.{kind}"
    for each in ("gate", "up", "down")
    for kind in ("weight", "bias")
}
_EXPERTS = (
    {"rename": f"{_HF}block_sparse_moe.gate.weight", "to": f"{_OURS}feed_forward.router.weight"},
    *(
        {
            "stack": f"{_HF}block_sparse_moe.experts.{{expert}}.{theirs}.weight",
            "to": f"{_OURS}feed_forward.experts.{ours}",
        }
        for theirs, ours in {"w1": "gate", "w3": "up", "w2": "down"}.items()
    ),
)

_GPT2 = "transformer.h.{i}."
_LINEAR = {
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.out",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}

_TITAN = "layers.{i}."

PRESETS: Mapping[str, Entries] = {
    "llama": _renamed(_AROUND | _ATTENTION | _DENSE),
    "qwen": _renamed(_AROUND | _ATTENTION | _NORMS | _DENSE),
    "mixtral": (*_renamed(_AROUND | _ATTENTION), *_EXPERTS),
    "gpt2": (
        # GPT-2's linear layers hold weights transposed, and the three projections of attention as one.
        *({"transpose": f"{_GPT2}{theirs}.weight"} for theirs in _LINEAR),
        *(
            {"rename": f"{_GPT2}{theirs}.{kind}", "to": f"{_OURS}{ours}.{kind}"}
            for theirs, ours in _LINEAR.items()
            for kind in ("weight", "bias")
        ),
        *(
            {
                "split": f"{_OURS}attention.qkv.{kind}",
                "to": [f"{_OURS}attention.{each}.{kind}" for each in ("query", "key", "value")],
            }
            for kind in ("weight", "bias")
        ),
        *_renamed(
            {
                "transformer.wte.weight": "embedding.weight",
                "transformer.wpe.weight": "positions.weight",
                "lm_head.weight": "head.weight",
            }
            | {f"transformer.ln_f.{kind}": f"norm.{kind}" for kind in ("weight", "bias")}
            | {f"{_GPT2}ln_1.{kind}": f"{_OURS}attention_norm.{kind}" for kind in ("weight", "bias")}
            | {f"{_GPT2}ln_2.{kind}": f"{_OURS}mlp_norm.{kind}" for kind in ("weight", "bias")}
        ),
    ),
    "llama-torchtitan": (
        # Rotary embeddings turn neighbouring elements in torchtitan, and elements half a head apart in Hugging Face.
        {"permute": f"{_HF}self_attn.q_proj.weight", "heads": "$heads"},
        {"permute": f"{_HF}self_attn.k_proj.weight", "heads": "$kv_heads"},
        *_renamed(
            {
                "model.embed_tokens.weight": "tok_embeddings.weight",
                "model.norm.weight": "norm.weight",
                "lm_head.weight": "output.weight",
                f"{_HF}input_layernorm.weight": f"{_TITAN}attention_norm.weight",
                f"{_HF}post_attention_layernorm.weight": f"{_TITAN}ffn_norm.weight",
                f"{_HF}mlp.gate_proj.weight": f"{_TITAN}feed_forward.w1.weight",
                f"{_HF}mlp.down_proj.weight": f"{_TITAN}feed_forward.w2.weight",
                f"{_HF}mlp.up_proj.weight": f"{_TITAN}feed_forward.w3.weight",
            }
            | {f"{_HF}self_attn.{each}_proj.weight": f"{_TITAN}attention.w{each}.weight" for each in "qkvo"}
        ),
    ),
}
"""The rules of known models by name: from Hugging Face's names to those of `sherd train`, or of torchtitan."""
