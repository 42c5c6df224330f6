"""torch.optim's SGD, Adam and AdamW in numpy float64, and learning rate schedules.

An optimizer keeps its own state, has a mutable `lr`, and returns new parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .tensors import Tensors

Rate = float | Sequence[float]


class Optimizer:
    """One parameter group. `initial_lr` is what a torch scheduler would have left in the group."""

    def __init__(self, lr: float, weight_decay: float = 0.0) -> None:
        self.lr = lr
        self.initial_lr: float | None = None
        self.weight_decay = weight_decay
        self.state: dict[int, dict[str, object]] = {}

    @property
    def groups(self) -> list[Optimizer]:
        return [self]

    def step(self, params: Tensors, grads: Tensors) -> Tensors:
        """Return the parameters after one step; params and grads are left as they are."""
        pairs = enumerate(zip(params, grads, strict=True))
        return [np.asarray(self.one(self.state.setdefault(i, {}), p, g)) for i, (p, g) in pairs]

    def one(self, state: dict, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class SGD(Optimizer):
    def __init__(self, lr: float, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> None:
        super().__init__(lr, weight_decay)
        self.momentum, self.nesterov = momentum, nesterov

    def one(self, state: dict, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        g = g + self.weight_decay * p
        if self.momentum:
            buffer = self.momentum * state["buffer"] + g if "buffer" in state else g
            state["buffer"] = buffer
            g = g + self.momentum * buffer if self.nesterov else buffer
        return p - self.lr * g


class Adam(Optimizer):
    """Weight decay is added to the gradient."""

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(lr, weight_decay)
        self.betas, self.eps = betas, eps

    def one(self, state: dict, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        return self.moments(state, p, g + self.weight_decay * p)

    def moments(self, state: dict, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        first, second = self.betas
        step = state["step"] = state.get("step", 0) + 1
        m = state["m"] = first * state.get("m", 0.0) + (1 - first) * g
        v = state["v"] = second * state.get("v", 0.0) + (1 - second) * g * g
        denominator = np.sqrt(v) / np.sqrt(1 - second**step) + self.eps
        return p - self.lr / (1 - first**step) * m / denominator


class AdamW(Adam):
    """Weight decay shrinks the parameters by lr * weight_decay before the step."""

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay)

    def one(self, state: dict, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        return self.moments(state, p * (1 - self.lr * self.weight_decay), g)


class Groups:
    """Parameter groups: `Groups(((0, 2), SGD(0.1)), ((1,), SGD(0.01)))`, by the tensors' indices."""

    def __init__(self, *members: tuple[Sequence[int], Optimizer]) -> None:
        self.members = members

    @property
    def groups(self) -> list[Optimizer]:
        return [optimizer for _, optimizer in self.members]

    def step(self, params: Tensors, grads: Tensors) -> Tensors:
        result = list(params)
        for indices, optimizer in self.members:
            new = optimizer.step([params[i] for i in indices], [grads[i] for i in indices])
            for i, p in zip(indices, new, strict=True):
                result[i] = p
        return result


class LearningRate:
    """t -> lr: multiplied by `factor` from each milestone on. Any function of t serves in its place."""

    def __init__(self, lr: float, milestones: Sequence[int] = (), factor: float = 0.1) -> None:
        self.lr, self.milestones, self.factor = lr, tuple(milestones), factor

    def __call__(self, t: int) -> float:
        return self.lr * self.factor ** sum(t >= milestone for milestone in self.milestones)


def rates(optimizer: Optimizer | Groups) -> list[float]:
    return [group.lr for group in optimizer.groups]


def set_rates(optimizer: Optimizer | Groups, lr: Rate) -> None:
    """Give all groups one learning rate, or each its own."""
    values = [lr] * len(optimizer.groups) if np.isscalar(lr) else lr
    for group, value in zip(optimizer.groups, values, strict=True):
        group.lr = value


def first_rate(optimizer: Optimizer | Groups) -> float:
    """The first group's `initial_lr`, else its lr now."""
    first = optimizer.groups[0]
    return first.lr if first.initial_lr is None else first.initial_lr


Base = Callable[[], Optimizer | Groups]
Schedule = Callable[[int], Rate]
