"""The order of a run: steps, evaluations, checkpoints, and the end."""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist

from sherd import Muon, clip_grad_norm_
from sherd.optim.muon import left_to_adamw
from sherd.train.axes import Axes
from sherd.train.checkpoint import Saver, load
from sherd.train.config import Config, InputError
from sherd.train.data import Windows, batch, tokens
from sherd.train.mesh import RankGrid
from sherd.train.parallel import build
from sherd.train.passes import Batch, Compute, Passes
from sherd.train.ranks import on_rank_0
from sherd.train.report import Report, peak_memory
from sherd.train.sampling import continued, readable
from sherd.train.saved import Checkpoint, folder_in
from sherd.train.text import Corpus

FINAL_LR = 0.02  # of the last step, as a share of the peak
WEIGHT_DECAY = 0.1  # of matrices; vectors, the norms' scales, have none
BETAS, MOMENTUM = (0.9, 0.99), 0.95
LARGEST_NORM = 1.0  # of the gradient over all ranks
PLANNED_AFTER = 20  # steps
QUICK_WINDOWS = 64  # of an evaluation between steps; the last one takes them all
SAMPLE, TEMPERATURE = 200, 0.6  # bytes


def learning_rate(step: int, config: Config) -> float:
    """The rate of step 0, 1, ..., steps - 1: a line up to the peak, then half a cosine down.

    While `config.steps` is 0, not yet known, the peak lasts.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if not config.steps:
        return config.lr
    progress = (step - config.warmup) / max(1, config.steps - 1 - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (FINAL_LR + (1 - FINAL_LR) * cosine)


@dataclass(frozen=True)
class StepFigures:
    """The figures of one step. `loss`: mean over the batch, before the update, in bits per byte."""

    loss: float
    gradient_norm: float
    learning_rate: float
    stop: bool  # some rank was asked to stop
    saved: bool  # all ranks have written their part of the checkpoint that was under way


class Trainer:
    """A sharded model, its optimizer, and the number of steps done. Every rank calls each method alike."""

    def __init__(self, config: Config, corpus: Corpus, grid: RankGrid) -> None:
        self.config, self.corpus, self.grid = config, corpus, grid
        self.micro_batch, self.num_micro_batches = config.split(grid.axes.num_data)
        self.model = build(config, grid)
        self.passes = Passes(self.model, grid)
        self.optimizer = optimizer_of(self.model, config)
        self.text, self.windows = tokens(corpus.train), Windows(tokens(corpus.held_out), config.context)
        self.done = 0
        self.seconds = 0.0  # spent in steps by this process
        self._latest: deque[float] = deque(maxlen=PLANNED_AFTER)  # of them, one by one
        self._compute: Compute = self._gradients
        if config.cuda_graph:
            self._compute = self.passes.replayed(self._gradients, self._micro_batches())

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return 0 < self.config.steps <= self.done

    @property
    def seconds_per_step(self) -> float:
        """The seconds that a step takes, of late."""
        return statistics.median(self._latest)

    def resume(self, checkpoint: Checkpoint) -> Checkpoint:
        """Take the state of the newest undamaged checkpoint, `checkpoint` if it is that, and return it."""
        found = load(checkpoint, self.model, self.optimizer)
        self.done = found.step
        return found

    def step(self, stop: bool = False, saved: bool = False) -> StepFigures:
        """Make one update, from the batch that the number of steps done decides.

        The result's `stop` is true if `stop` is on any rank; its `saved` is true if `saved` is on all ranks.

        Raises:
            InputError: the loss or its gradient is no longer finite.
        """
        begun = time.monotonic()
        self.model.train()
        loss, total_norm = self._compute(self._micro_batches())
        told = torch.stack([loss, loss.new_tensor(stop), loss.new_tensor(saved)])
        dist.all_reduce(told)  # one message for all, so that all ranks leave the loop after the same step
        nats, num_stops, num_saved = told.tolist()
        nats, norm = nats / (self.num_micro_batches * self.grid.axes.num_ranks), float(total_norm)
        if not math.isfinite(nats + norm):
            # Before the update: what a checkpoint holds stays finite, and can be gone on from.
            raise InputError(
                f"step {self.done + 1} has a loss of {nats} nats and a gradient of norm {norm}; "
                "--resume with a lower lr"
            )
        rate = learning_rate(self.done, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        self._latest.append(time.monotonic() - begun)
        self.seconds += self._latest[-1]
        if not self.config.steps and len(self._latest) == PLANNED_AFTER:
            self._plan()
        return StepFigures(nats / math.log(2), norm, rate, num_stops > 0, num_saved == self.grid.axes.num_ranks)

    def _gradients(self, micro_batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
        """Leave clipped gradients. Returns the sum of this rank's losses in nats, and the norm before clipping."""
        loss = self.passes.train(micro_batches, self.num_micro_batches)
        return loss, clip_grad_norm_(self.model.parameters(), LARGEST_NORM)

    def _plan(self) -> None:
        """Fix the number of steps to what fits into `minutes`; rank 0's clock decides for all.

        From here on no clock has a say, and checkpoints know the number, so a resume repeats the run exactly.
        """
        left = 60 * self.config.minutes - self.seconds
        steps = on_rank_0(lambda: self.done + max(1, int(left / self.seconds_per_step)))
        self.config = replace(self.config, steps=steps)

    def _micro_batches(self) -> Iterator[Batch]:
        """This rank's samples of the batch that comes next. What the batch is depends on no mesh."""
        config, size, num_ranks = self.config, self.micro_batch, self.grid.axes.num_data
        for turn in range(self.num_micro_batches):
            number = turn * num_ranks + self.grid.data_rank  # of the micro-batches of this step
            # Dropout draws from the global generator: seeded each time, it survives a resume without being saved.
            torch.manual_seed(hash((config.seed, self.done, number)))
            yield batch(self.text, config.context, config.seed, self.done * config.batch + number * size, size)

    def sample(self, length: int = SAMPLE) -> str:
        """Text of so many bytes. All ranks compute it together: a forward gathers every rank's shards."""
        self.model.eval()
        config = self.config
        return "".join(readable(continued(self.passes.logits, config.context, length, b"", TEMPERATURE, config.seed)))

    def judge(self, num_windows: int | None = None) -> float:
        """The bits per byte of the held-out text, or of about `num_windows` windows spread evenly over it."""
        return self.passes.judge(self.windows, self.micro_batch, num_windows) / math.log(2)


def optimizer_of(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Returns the optimizer of the config."""
    matrices = [(name, each) for name, each in model.named_parameters() if each.ndim > 1]
    vectors = [(name, each) for name, each in model.named_parameters() if each.ndim <= 1]
    if config.optimizer == "adamw":
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        fused = not (
            config.reproducible and next(model.parameters()).device.type == "cpu"
        )  # which rounds ends otherwise
        return torch.optim.AdamW([group for group in groups if group["params"]], config.lr, BETAS, fused=fused)
    left = left_to_adamw(model)  # by name: whether it is no hidden matrix
    groups = [
        {"params": [(name, each) for name, each in matrices if not left[name]]},
        {"params": [(name, each) for name, each in matrices if left[name]], "algorithm": "adamw"},
        {"params": vectors, "algorithm": "adamw", "weight_decay": 0.0},
    ]
    # At this rate a step changes a matrix's elements as much as AdamW's, so one schedule serves both.
    return Muon(
        [group for group in groups if group["params"]],
        lr=config.lr,
        weight_decay=WEIGHT_DECAY,
        momentum=MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
        adamw={"betas": BETAS, "weight_decay": WEIGHT_DECAY},
    )


def introduce(trainer: Trainer, out: Path, resumed: Checkpoint | None, report: Report) -> None:
    """Say what is about to be trained, on what, and from where."""
    corpus, config, axes = trainer.corpus, trainer.config, trainer.grid.axes
    num_parameters = sum(each.numel() for each in trainer.model.parameters())
    done = resumed.step if resumed else 0
    report.write("start", step=done, ranks=axes.num_ranks, config=config.tree(), text=corpus.digest)
    mesh = "" if axes == Axes(dp=axes.num_ranks) else f", {axes}"
    over = f"{axes.in_words}{mesh} on {trainer.passes.device}"
    report.say(f"model  {num_parameters:,} parameters, sharded over {over}")
    report.say(
        f"text   {corpus.num_documents:,} documents in {corpus.source}: {len(corpus.train):,} bytes "
        f"to train on, {len(corpus.held_out):,} held out"
    )
    steps = f"{config.steps:,} steps" if config.steps else f"{config.minutes:g} minutes of steps"
    report.say(f"run    {steps} of {config.batch} x {config.context} bytes, in {out}")
    for note in resumed.notes if resumed else ():
        report.say(f"note   {note}; passed over")
    for change in resumed.changes(config) if resumed else ():
        report.say(f"note   {change}; losses will differ from those of the run as it was begun")
    report.begin(done, config.steps)


def train(
    trainer: Trainer, out: Path, report: Report, stop: Callable[[], bool] = lambda: False, trace: int | None = None
) -> bool:
    """Do the steps that are left, saving and judging on the way. Returns False if it was stopped before the last.

    Step number `trace`, 0 for the third from here, is recorded in `out`. Raises InputError if the loss or its gradient
    is no longer finite, and NotSaved if a checkpoint could not be written.
    """
    begun, every = trainer.done, trainer.config.every
    if trace is not None and trainer.config.cuda_graph:
        raise InputError("--trace records what Python does in a step, and a replay runs none; set cuda_graph = false")
    if trace == 0:
        trace = min(begun + 3, trainer.config.steps or begun + 3)
    with Saver(out, trainer.model, trainer.optimizer, trainer.corpus.digest, report, saved=begun) as saver:
        if begun:
            report.say(f"going on after step {begun}")
            if every and begun % every == 0 and not trainer.finished:
                evaluate(trainer, report)  # it was saved, and may have been stopped before it was judged
        while not trainer.finished:
            make = partial(recorded, trainer, out, report) if trainer.done + 1 == trace else trainer.step
            step = make(stop(), saver.is_written)
            if step.saved:
                saver.settle()
            tell(trainer, step, report)
            is_due = bool(every) and trainer.done % every == 0
            if step.stop or is_due:
                saver.save(trainer.done, trainer.config)
            if step.stop and not trainer.finished:
                saver.settle()
                report.over()
                report.say(f"stopped after step {trainer.done}, which is saved; --resume goes on from there")
                return False
            if is_due and not trainer.finished:
                evaluate(trainer, report)
        if saver.saved < trainer.done:
            saver.save(trainer.done, trainer.config)
    return True


def recorded(trainer: Trainer, out: Path, report: Report, stop: bool, saved: bool) -> StepFigures:
    """Make a step, and keep a timeline of it. All ranks record it, or the others would wait for rank 0."""
    from sherd.tools.plan.files import TIMELINE, to_json
    from sherd.tools.plan.tracing import traced

    number, path = trainer.done + 1, out / TIMELINE
    title = f"step {number} of {out.name} on {trainer.grid.axes.in_words}"
    with traced(trainer.model, trainer.optimizer, title) as trace:
        step = trainer.step(stop, saved)
    on_rank_0(lambda: path.write_text(to_json(trace.timeline), encoding="utf-8"))
    report.say(f"step {number:>6}  recorded in {path}; sherd report {out} shows it")
    return step


def tell(trainer: Trainer, step: StepFigures, report: Report) -> None:
    """Report the figures of a step."""
    config, seconds = trainer.config, trainer.seconds_per_step
    report.write(
        "step",
        step=trainer.done,
        steps=config.steps,
        loss=step.loss,
        gradient_norm=step.gradient_norm,
        learning_rate=step.learning_rate,
        tokens_per_second=config.batch * config.context / seconds,
        peak_bytes=peak_memory(trainer.passes.device),
        seconds=trainer.seconds,
        seconds_left=(config.steps - trainer.done) * seconds if config.steps else None,
    )


def evaluate(trainer: Trainer, report: Report) -> None:
    """Judge the model on a part of the held-out text."""
    bits = trainer.judge(QUICK_WINDOWS)
    report.write("evaluation", step=trainer.done, bits=bits)
    report.say(f"step {trainer.done:>6}  held-out {_in_words(bits)}, about {QUICK_WINDOWS} windows")


def _in_words(bits: float) -> str:
    return f"{bits:.3f} bits per byte ({bits * math.log(2):.3f} nats)"


def finish(trainer: Trainer, out: Path, report: Report) -> None:
    """Judge the model on all held-out bytes, and let it write."""
    num_bytes = trainer.windows.num_bytes
    report.say(f"judging the model on all {num_bytes:,} held-out bytes ...")
    bits = trainer.judge()
    report.write("evaluation", step=trainer.done, bits=bits)
    report.say(f"drawing the sample, {SAMPLE} bytes ...")
    sample = trainer.sample()
    if dist.get_rank() == 0:
        (out / "sample.txt").write_text(sample, encoding="utf-8")
    report.say(f"\nsample\n------\n{sample}\n------")
    report.say(f"held-out  {_in_words(bits)}, over all {num_bytes:,} bytes")
    report.say(f"model     {folder_in(out).folder_of(trainer.done)}")
    report.say(f'try       sherd generate {shlex.quote(str(out))} --prompt "def " --tokens 200')
    report.outcome = "finished"
