"""Training in half precision: every method, a model with a norm in float32, and the same by hand on float32 masters."""

from __future__ import annotations

import torch

import hpctk

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PERIOD = 2
COMPRESSED = hpctk.TopK(0.3)

#: What keeps the gradient in its own way, or sends it so.
GRADIENT = {
    "Mean": hpctk.Mean(),
    "Mean of TopK": hpctk.Mean(COMPRESSED),
    "Mean of Half": hpctk.Mean(hpctk.Half("bfloat16")),
    "Mean of Sign": hpctk.Mean(hpctk.Sign()),
    "Mean of PowerSGD": hpctk.Mean(hpctk.PowerSGD(1)),
    "Mean, unit norm": hpctk.Mean(unit_norm=True),
    "AdaCons": hpctk.AdaCons(),
    "EF21": hpctk.EF21(COMPRESSED),
}
UPDATE = {
    "SAEF": hpctk.SAEF(COMPRESSED, average_every=3),
    "SAEF, Sign both ways": hpctk.SAEF(hpctk.Sign(), hpctk.Sign()),
    "SAEF of QSGD": hpctk.SAEF(hpctk.QSGD(4)),
    "SAEF, not ahead": hpctk.SAEF(COMPRESSED, step_ahead=False),
    "SA-PEF": hpctk.SAEF(COMPRESSED, step_ahead=0.5, period=PERIOD),
    "SASG": hpctk.SASG(0.3, warmup=2, max_delay=3, reduce="mean"),
}
MODEL = {
    "LocalSGD": hpctk.LocalSGD(PERIOD),
    "LocalSGD of TopK": hpctk.LocalSGD(PERIOD, compressor=COMPRESSED),
    "EASGD": hpctk.EASGD(PERIOD),
    "LSGD": hpctk.LSGD(PERIOD),
    "CELGC": hpctk.CELGC(0.25, PERIOD),
    "MGRAWA": hpctk.MGRAWA(PERIOD),
    "LGRAWA": hpctk.LGRAWA(PERIOD),
    "DiLoCo": hpctk.DiLoCo(PERIOD),
    "DiLoCo in fragments": hpctk.DiLoCo(4, compressor=COMPRESSED, fragments=2, delay=1),
    "SparseLoCo": hpctk.SparseLoCo(PERIOD, k=3, chunk=8),
    "EPISODE": hpctk.EPISODE(0.25, PERIOD),
}
CLIPPED = {"Mean, clipped": hpctk.Mean(clip=0.25)}
EVERY = {**GRADIENT, **CLIPPED, **UPDATE, **MODEL}


class Mixed(torch.nn.Module):
    """Two layers in half precision, a norm in float32 between them."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.last = torch.nn.Linear(6, 5, dtype=dtype), torch.nn.Linear(5, 3, dtype=dtype)
        self.norm = torch.nn.LayerNorm(5)
        self.register_buffer("seen", torch.zeros(2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output in float32."""
        half = self.first.weight.dtype
        normed = self.norm(torch.tanh(self.first(x.to(half))).float())
        return self.last(normed.to(half)).float()


def loss_of(model: torch.nn.Module, rank: int, t: int) -> torch.Tensor:
    """Return the loss of a rank's batch number t."""
    generator = torch.Generator().manual_seed(1000 * rank + t)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    return ((model(x) - y) ** 2).mean()


def sgd(parameters) -> torch.optim.Optimizer:
    """Return an optimizer whose steps are often less than half of what bfloat16 resolves."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)


def step(opt, model, rank, t) -> None:
    """Do one step, by a closure: SASG needs one, LSGD the loss."""

    def closure():
        opt.zero_grad()
        loss = loss_of(model, rank, t)
        loss.backward()
        return loss

    opt.step(closure)


def by_hand(make, dtype, rank, steps) -> torch.nn.Module:
    """Return a model of float32 whose gradients are those of its rounded copy: `make` gives its optimizer."""
    wide, half = Mixed(dtype).float(), Mixed(dtype)
    opt = make(wide)

    for t in range(steps):

        def closure(t=t):
            opt.zero_grad()
            with torch.no_grad():
                for p, q in zip(half.parameters(), wide.parameters(), strict=True):
                    p.copy_(q)
            half.zero_grad()
            loss = loss_of(half, rank, t)
            loss.backward()
            for p, q in zip(half.parameters(), wide.parameters(), strict=True):
                q.grad = p.grad.float()
            return loss

        opt.step(closure)
    return wide


def bits(tensors) -> str:
    """Return the bits of tensors as text."""
    return b"".join(x.detach().contiguous().view(torch.uint8).numpy().tobytes() for x in tensors).hex()
