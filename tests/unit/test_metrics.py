"""Live metrics: what a step has cost, told to functions, TensorBoard and OpenTelemetry."""

import sys

import pytest
import torch

import hpctk
from hpctk.errors import SettingError
from hpctk.metrics import OpenTelemetry, StepMetrics, TensorBoard

STEP = StepMetrics(3, 1, 0.5, 100, 90, 4, 0.1, 0.2, 2.5, {"rounds": 1, "uploads": 1})


@pytest.fixture
def trainee(tmp_path):
    """Return an optimizer on one rank, joined to no other, and its model."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = torch.nn.Linear(4, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    yield model, hpctk.ddp.DistributedOptimizer(base, hpctk.Mean(), model=model)
    dist.destroy_process_group()


def step(model, opt):
    def closure():
        opt.zero_grad()
        loss = model(torch.ones(3, 4)).square().mean()
        loss.backward()
        return loss.detach()

    return float(opt.step(closure))


def test_a_function_is_told_of_every_step(trainee):
    model, opt = trainee
    step(model, opt)
    told = []
    opt.add_metrics(told.append)
    losses = [step(model, opt) for _ in range(3)]
    assert [one.step for one in told] == [1, 2, 3]
    assert [one.loss for one in told] == losses
    # What was before it was asked for is not told as if it belonged to the first step.
    assert [one.counts["rounds"] for one in told] == [1, 1, 1]
    assert all(one.uploads == 1 and one.seconds > 0 and one.exposed_s >= 0 for one in told)


def test_one_that_fails_is_called_no_more_and_training_goes_on(trainee, caplog):
    model, opt = trainee
    called, told = [], []

    def failing(metrics):
        called.append(metrics)
        raise OSError("disk full")

    opt.add_metrics(failing)
    opt.add_metrics(told.append)
    for _ in range(3):
        step(model, opt)
    assert (len(called), len(told)) == (1, 3)
    assert len([text for text in caplog.messages if "is called no more" in text]) == 1


def test_what_is_no_function_is_refused(trainee):
    with pytest.raises(SettingError, match=r"add_metrics\('board'\): need a function"):
        trainee[1].add_metrics("board")


def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path, every=3, ranks=[1])
    for number, rank in ((3, 1), (4, 1), (6, 1), (6, 0)):
        board(StepMetrics(number, rank, 0.5, 100, 90, 4, 0.1, 0.2, 2.5))
    board.close()
    assert [folder.name for folder in tmp_path.iterdir()] == ["rank00001"]
    read = EventAccumulator(str(tmp_path / "rank00001"))
    read.Reload()
    assert {"hpctk/sent_bytes", "hpctk/waiting_s", "hpctk/exposed_s", "hpctk/loss", "hpctk/uploads"} <= set(
        read.Tags()["scalars"]
    )
    assert [(one.step, one.value) for one in read.Scalars("hpctk/sent_bytes")] == [(3, 100), (6, 100)]


def test_open_telemetry():
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    export = OpenTelemetry(MeterProvider([reader]).get_meter("test"), attributes={"run": "7"})
    export(STEP)
    export(STEP)
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    found = {metric.name: metric.data.data_points[0] for metric in scope.metrics}
    assert found["hpctk.sent_bytes"].value == 200
    assert found["hpctk.uploads"].value == 2
    assert found["hpctk.loss"].value == 2.5
    assert found["hpctk.step_seconds"].sum == 1.0
    assert dict(found["hpctk.loss"].attributes) == {"run": "7", "rank": 1}


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoard("x"), r"hpctk\[tensorboard\]"),
        ("opentelemetry", OpenTelemetry, r"hpctk\[opentelemetry\]"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, module, make, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingError, match=extra):
        make()
