"""Mutants of the library: one expression turned or one statement dropped, inside a function.

Left out is what no test can see, or what only a reader sees: annotations, decorators, defaults, docstrings, messages of
errors, assertions ("this cannot be"), and f-strings, inside which Python 3.11 gives wrong columns.
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
DROPPED = (ast.Expr, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, slots=True)
class Mutant:
    """Bytes `start` to `end` of `file`, which are `before`, replaced by `after`."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def applied(self, root: Path) -> bytes:
        """Returns the file's text with the mutant in it."""
        return self._replaced(root, self.after)

    def probed(self, root: Path, number: int) -> bytes:
        """Returns the file's text with a call that writes down which test reaches the mutant's place."""
        call = f"__import__('sherd._reached')._reached.reached({number})"
        is_statement = self.after == "pass"
        return self._replaced(root, f"{call}; {self.before}" if is_statement else f"({call} or ({self.before}))")

    def _replaced(self, root: Path, text: str) -> bytes:
        source = (root / self.file).read_bytes()
        if source[self.start : self.end].decode() != self.before:
            raise ValueError(f"{self.file}:{self.line} is no longer {self.before!r}: draw the mutants anew")
        return source[: self.start] + text.encode() + source[self.end :]


def drawn(root: Path, seed: int, count: int) -> list[Mutant]:
    """Returns `count` of all mutants of the package below `root`, each equally likely."""
    mutants = [
        mutant
        for path in sorted((root / "sherd").rglob("*.py"))
        for mutant in mutants_of(path.read_text(), str(path.relative_to(root)))
    ]
    return sorted(random.Random(seed).sample(mutants, count), key=lambda mutant: (mutant.file, mutant.start))


def mutants_of(source: str, file: str) -> Iterator[Mutant]:
    """Yields every mutant of one file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, after in changes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        yield Mutant(file, node.lineno, start, end, source.encode()[start:end].decode(), after)


def changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yields each node inside a function that a mutant replaces, with the text in its place."""
    for function in outermost_functions(tree):
        waiting: list[ast.AST] = list(function.body)
        while waiting:
            node = waiting.pop()
            after = turned(node)
            if after is not None:
                assert isinstance(node, ast.expr | ast.stmt), "nothing else is turned"
                yield node, after
            waiting += seen_by_tests(node)


def outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if not any(ast.unparse(decorator).endswith("overload") for decorator in child.decorator_list):
                yield child
        else:
            yield from outermost_functions(child)


def seen_by_tests(node: ast.AST) -> list[ast.AST]:
    """Returns the children of `node` in which mutants make sense."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Raise():
            return []
        case ast.AnnAssign(value=value):
            return [value] if value is not None else []
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
            return list(body)
        case ast.match_case(guard=guard, body=body):
            return [*([guard] if guard is not None else []), *body]
        case _:
            return list(ast.iter_child_nodes(node))


def turned(node: ast.AST) -> str | None:
    """Returns the text that replaces `node`; None if nothing does."""
    match node:
        case ast.Expr(value=ast.Constant() | ast.Yield() | ast.YieldFrom() | ast.Await()):
            return None
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "pass"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"({ast.unparse(ast.Compare(left, [COMPARISONS[type(op)]()], [right]))})"
        case ast.BoolOp(op=op, values=values):
            other = ast.And() if isinstance(op, ast.Or) else ast.Or()
            return f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return f"({ast.unparse(ast.BinOp(left, ARITHMETIC[type(op)](), right))})"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value)):
            return str(value + 1)
        case ast.IfExp(test=test, body=body, orelse=other):
            return f"({ast.unparse(ast.IfExp(test, other, body))})"
        case _ if isinstance(node, DROPPED):
            return "pass"
        case _:
            return None
