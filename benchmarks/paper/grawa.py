"""GRAWA against EASGD, LSGD and uniform weights: test error and flatness at equal steps.

Start it with `./launch/bench paper/grawa`, on 4 ranks. As published: period 32, pull .5, prox .01 for
GRAWA; period 4, pull .1 (and prox .1) for EASGD and LSGD; SGD with Nesterov momentum .9 and weight decay 1e-4. Their
ResNets and CIFAR are scaled down to a CNN on Fashion-MNIST. All but the plain mean also at GRAWA's period. The control
is the same pull with equal weights. Flatness is the trace of the Hessian on held-out samples, by Hutchinson's
estimate with 16 vectors of signs, the same for all.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import _experiment
import torch
from _training import tasks

import hpctk
from hpctk.cli.core.table import table

RATE, BATCH, VECTORS, LOOKED_AT = 0.05, 32, 16, 256
#: Trace of the Hessian, DenseNet on CIFAR-100, 8 workers, in the authors' repository.
PUBLISHED = {"MGRAWA": 165, "LGRAWA": 177, "EASGD, period 4": 194, "LSGD, period 4": 195, "data-parallel SGD": 436}


def uniform(model):
    """Return MGRAWA with equal weights: its probe gives every rank the same gradient."""

    def probe():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    return hpctk.MGRAWA(norms="probe", probe=probe)


CONTENDERS = {
    "data-parallel SGD": hpctk.Mean(),
    "MGRAWA": hpctk.MGRAWA(),
    "LGRAWA": hpctk.LGRAWA(),
    "uniform weights": uniform,
    "LocalSGD": hpctk.LocalSGD(period=32),
    "EASGD": hpctk.EASGD(period=32),
    "LSGD": hpctk.LSGD(period=32),
    "EASGD, period 4": hpctk.EASGD(),
    "LSGD, period 4": hpctk.LSGD(),
}


def trace(task, model):
    """Return an estimate of the trace of the Hessian of the held-out loss."""
    parameters = list(model.parameters())
    loss = task.loss(model, (task.test_inputs[:LOOKED_AT], task.test_targets[:LOOKED_AT]))
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    generator, total = torch.Generator().manual_seed(0), 0.0
    for _ in range(VECTORS):
        signs = [torch.randint(0, 2, p.shape, generator=generator, dtype=p.dtype) * 2 - 1 for p in parameters]
        products = torch.autograd.grad(gradients, parameters, signs, retain_graph=True)
        total += sum(float((product * sign).sum()) for product, sign in zip(products, signs, strict=True))
    return total / VECTORS


def main():
    options = _experiment.parsed(__doc__, steps=1024, every=128, seeds=3)
    experiment = _experiment.Experiment("grawa", options, rate=RATE)
    here = experiment.here
    task = tasks.make("cnn", options.data, tiny=options.tiny)
    task.make_model = partial(tasks.cnn, task.inputs.shape[-1], 16 if options.tiny else 64)
    task.batch = BATCH
    optimizer = partial(torch.optim.SGD, lr=RATE, momentum=0.9, nesterov=True, weight_decay=1e-4)
    runs = experiment.run_all(
        CONTENDERS,
        lambda method, seed: _experiment.follow(
            here, task, method, optimizer, seed=seed, steps=options.steps, every=options.every,
            measure=partial(trace, task),
        ),
    )  # fmt: skip
    rows, shown = [], []
    for name, found in runs.items():
        errors = [1 - run["curve"][-1][2] for run in found]
        traces = [run["measured"] for run in found]
        row = {
            "name": name, "seconds": median(run["seconds"] for run in found), "error": median(errors),
            "loss": median(run["curve"][-1][1] for run in found), "trace": median(traces),
        }  # fmt: skip
        rows.append(row)
        shown.append([
            name, f"{row['error']:.2%}", f"{min(errors):.2%}-{max(errors):.2%}", f"{row['loss']:.4f}",
            f"{row['trace']:.3g}", f"{min(traces):.3g}-{max(traces):.3g}", str(PUBLISHED.get(name, "-")),
        ])  # fmt: skip
    head = ["contender", "test error", "range", "test loss", "trace", "range", "published trace"]
    text = f"{task.data}, CNN, {here.size} workers, {options.steps} steps, {options.seeds} seeds"
    experiment.finish(f"{text}\n{table(head, shown)}", rows)


if __name__ == "__main__":
    main()
