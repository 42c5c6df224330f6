"""The workers of a simulation: each its parameters and its own base optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from . import tensors
from .compress import as_saef
from .optimizers import Base, Schedule, first_rate, rates, set_rates
from .problem import FixedProblem
from .tensors import Tensors


class Workers:
    """Parameters x[k] and optimizers[k]; `starts` sets x after the optimizers are made."""

    def __init__(
        self, problem: FixedProblem, base: Base, lr: Schedule | None = None, starts: Sequence[Tensors] | None = None
    ) -> None:
        self.problem, self.lr = problem, lr
        self.size = problem.workers
        self.numbers = list(range(self.size))
        self.optimizers = [base() for _ in range(self.size)]
        self.x = [tensors.copy(x) for x in (starts or [problem.start()] * self.size)]
        #: The residuals of all workers when they were copied last, who there was, and the step; None: due.
        self.copies: tuple[list[Tensors], list[int]] = [], []
        self.copied: int | None = 0
        #: Whether residuals were shared out in the last step.
        self.shared = False

    def lose_shared(self, t: int, residuals: list[Tensors], *lists: list, summed: bool = False) -> bool:
        """As `lose`; what copies there are of lost residuals is shared out.

        So that the mean over workers is kept, or where they are `summed` the sum.
        """
        every = self.problem.buddy
        lost = self.problem.lost.get(t, [])
        if every and (self.copied is None or t - self.copied >= every):
            self.copies, self.copied = ([tensors.copy(e) for e in residuals], list(self.numbers)), t
        kept, numbers = self.copies
        found = []
        for number in lost if every else []:
            place = numbers.index(number) if number in numbers else None
            if place is not None and numbers[(place + 1) % len(numbers)] not in lost:
                found.append(kept[place])
        gone = self.lose(t, residuals, *lists)
        if gone:
            self.copies, self.copied = ([], []), None
        self.shared = bool(found)
        if found:
            shares = tensors.mean([*residuals, *found])
            if summed:
                shares = tensors.scale(shares, (len(residuals) + len(found)) / len(residuals))
            residuals[:] = [tensors.copy(shares) for _ in residuals]
        return gone

    def lose(self, t: int, *lists: list) -> bool:
        """Lose the workers that are gone before step t, with their entries in `lists`; return whether there are any."""
        lost = self.problem.lost.get(t, [])
        # Not in place: a trajectory may hold it.
        self.x = list(self.x)
        for number in lost:
            place = self.numbers.index(number)
            for each in (self.numbers, self.optimizers, self.x, *lists):
                del each[place]
        self.size = len(self.numbers)
        return bool(lost)

    def gradient(self, k: int, t: int) -> Tensors:
        """Worker k's gradient where it stands, after setting its learning rate for step t."""
        if self.lr is not None:
            set_rates(self.optimizers[k], self.lr(t))
        return self.problem.gradient(self.numbers[k], self.x[k], t)

    def gradients(self, t: int) -> list[Tensors]:
        """All workers' gradients, none of which may be bad."""
        all_gradients = [self.gradient(k, t) for k in range(self.size)]
        for k, g in enumerate(all_gradients):
            if not tensors.finite(g):
                raise FloatingPointError(f"worker {k}, step {t}: the gradient is not finite")
        return all_gradients

    def step(self, k: int, gradient: Tensors, factor: float = 1.0) -> None:
        """Worker k's base step with its learning rates times `factor`; a bad gradient is not applied."""
        if not tensors.finite(gradient):
            return
        optimizer = self.optimizers[k]
        usual = rates(optimizer)
        set_rates(optimizer, [factor * lr for lr in usual])
        self.x[k] = optimizer.step(self.x[k], gradient)
        set_rates(optimizer, usual)

    def update(self, k: int, gradient: Tensors) -> Tensors:
        """What worker k's base optimizer would subtract from x[k]; x[k] stays, its state moves on."""
        return tensors.subtract(self.x[k], self.optimizers[k].step(self.x[k], gradient))

    def mean(self) -> Tensors:
        return tensors.mean(self.x)


class Clip:
    """CELGC's rule: the factor min(1, R/(1e-10+n)) on every group's lr, R = clip/lr0 fixed at the start."""

    def __init__(self, clip: float, optimizer) -> None:
        self.ratio = clip / first_rate(optimizer)

    def factor(self, norm: float) -> float:
        return min(1.0, self.ratio / (1e-10 + norm))


class Average:
    """All workers' mean in their places; with a compressor the last such model, moved by what each sends of its way.

    p = e_k + w_k*(x - x_k);  c_k = C(p);  e_k = p - c_k;  x <- x - mean_k c_k, all weights 1 where none are given.
    """

    def __init__(self, workers: Workers, compressor) -> None:
        self.workers, self.compressor = workers, compressor
        self.x = tensors.copy(workers.x[0])
        self.residuals = [tensors.zeros(self.x) for _ in range(workers.size)]

    def move(self, weights=None) -> None:
        sent = []
        for k, mine in enumerate(self.workers.x):
            way = tensors.subtract(self.x, mine)
            if weights is not None:
                way = tensors.each(lambda w, d: w * d, list(weights[k]), way)
            wanted = tensors.add(self.residuals[k], way)
            sent.append(as_saef(self.compressor, wanted))
            self.residuals[k] = tensors.subtract(wanted, sent[-1])
        self.x = tensors.subtract(self.x, tensors.mean(sent))

    def __call__(self) -> None:
        if self.compressor is None:
            self.x = self.workers.mean()
        else:
            self.move()
        self.workers.x = [self.x] * self.workers.size
