"""Mutants are what a test could notice, and nothing else of a file changes."""

import ast

from tests.mutants.sites import mutants_of

SOURCE = '''
LIMIT = 3

@decorated(1)
def steps(values: list[int], most: int = 4) -> int:
    """Counts 1 by 1."""
    assert most > 1, "why"
    total, seen.last = 0, None
    for each in values:
        if each in (1,) and not each == most or each is None:
            raise ValueError(f"{each + 1} is over {most - 1}")
        total += each * 2 if each < 5 else 0
        seen[each] = True
        notify(each)
    return total
'''
EXPECTED = {
    "0": "1",
    "1": "2",
    "2": "3",
    "5": "6",
    "True": "False",
    "each in (1,)": "(each not in (1,))",
    "each == most": "(each != most)",
    "not each == most": "(each == most)",
    "each is None": "(each is not None)",
    "each in (1,) and not each == most": "(each in (1,) or not each == most)",
    "each in (1,) and not each == most or each is None": "((each in (1,) and (not each == most)) and each is None)",
    "each * 2": "(each // 2)",
    "each < 5": "(each <= 5)",
    "each * 2 if each < 5 else 0": "(0 if each < 5 else each * 2)",
    'raise ValueError(f"{each + 1} is over {most - 1}")': "pass",
    "total += each * 2 if each < 5 else 0": "pass",
    "seen[each] = True": "pass",
    "notify(each)": "pass",
}


def test_each_expression_and_statement_inside_functions_is_turned_or_dropped_once(tmp_path):
    file = tmp_path / "steps.py"
    file.write_text(SOURCE)
    mutants = list(mutants_of(SOURCE, file.name))
    for mutant in mutants:
        source = mutant.applied(tmp_path).decode()
        assert source == SOURCE[: mutant.start] + mutant.after + SOURCE[mutant.end :]
        ast.parse(source)
        ast.parse(mutant.probed(tmp_path, 1))
    found = {mutant.before: ast.unparse(ast.parse(mutant.after)) for mutant in mutants}
    assert found == {before: ast.unparse(ast.parse(after)) for before, after in EXPECTED.items()}
