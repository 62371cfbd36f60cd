"""Draws the losses that a recipe prints: it runs examples/recipes/NAME.py on two ranks, and writes NAME.svg.

    python docs/recipes/loss.py pretrain --steps 400

What follows the name are the recipe's own arguments. A line counts if it begins as `step 10  loss 2.31`; of
`step 10  loss 2.31  held-out loss 2.40` both are drawn.
"""

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

HERE = Path(__file__).parent
STEP = re.compile(r"^step +(\d+)(  .*)$", re.MULTILINE)
LOSS = re.compile(r"  ((?:\S+ )?loss) +(\d+\.\d+)")
# Text stays text, which takes few bytes; grey is seen on light and dark pages; the same losses give the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "sherd", "font.sans-serif": ["DejaVu Sans"]}
STYLE |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#808080")


def losses(text: str) -> dict[str, dict[int, float]]:
    """Returns the losses by name and step."""
    found: dict[str, dict[int, float]] = {}
    for step, rest in STEP.findall(text):
        for name, value in LOSS.findall(rest):
            found.setdefault(name, {})[int(step)] = float(value)
    return found


def draw(found: dict[str, dict[int, float]], title: str, picture: Path) -> None:
    with rc_context(STYLE):
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        axes = figure.subplots()
        for name, values in found.items():
            axes.plot(list(values), list(values.values()), linewidth=1.2, label=name)
        axes.set(xlabel="step", ylabel="loss", title=title)
        axes.title.set_fontsize("medium")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(found) > 1:
            axes.legend(frameon=False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    picture.write_text(re.sub(r"(\.\d)\d{3,}", r"\1", drawn.getvalue()))  # a tenth of a point is enough


def main(name: str, *words: str) -> None:
    program = HERE.parent.parent / "examples/recipes" / f"{name}.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = ""
    with tempfile.TemporaryDirectory() as folder:  # for what the recipe writes
        command = [*torchrun, str(program), *words]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as run:
            for line in run.stdout or ():
                print(line, end="", flush=True)
                printed += line
    if run.returncode:
        raise SystemExit(run.returncode)
    draw(losses(printed), " ".join([f"{name}.py", *words]), HERE / f"{name}.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
