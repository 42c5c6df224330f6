"""Four ranks, two replicas of two shards: what each rank finds out, as FOLDER/RANK.json."""

import copy
import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hpctk
from hpctk.errors import HpctkError

dist.init_process_group("gloo")
RANK, MESH = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def model(mesh):
    torch.manual_seed(3)
    made = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
    if mesh is not None:
        for layer in (made[0], made[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(made, mesh=mesh)
    return made


def train(made, steps, first=0, bad_step=None):
    base, losses = torch.optim.SGD(made.parameters(), lr=0.1), []
    for t in range(first, first + steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * t + RANK))
        base.zero_grad()
        loss = (made(x) - x[:, :5].sin()).square().mean()
        (loss * float("nan") if t == bad_step and RANK == 3 else loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(made.parameters(), 1e9).full_tensor()
        if norm.isfinite():
            base.step()
        losses.append(float(loss.detach()))
    return losses


def digest(made):
    whole = b"".join(p.full_tensor().detach().numpy().tobytes() for p in made.parameters())
    return hashlib.sha256(whole).hexdigest()


def refused(make):
    try:
        make()
    except HpctkError as error:
        return str(error)
    return "not refused"


def attached(method):
    made = model(MESH["shard"])
    return made, hpctk.fsdp.attach(made, method, MESH)


#: All that sends all, and one of every compressor.
ALL = {
    "Identity": hpctk.Mean(hpctk.Identity()),
    "TopK": hpctk.Mean(hpctk.TopK(1.0)),
    "RandomK": hpctk.Mean(hpctk.RandomK(1.0)),
    "EF21": hpctk.EF21(hpctk.Identity(), momentum=0.0),
}
METHODS = {
    **{f"all by {name}": method for name, method in ALL.items()},
    **{
        f"Mean {type(each).__name__}": hpctk.Mean(each)
        for each in (
            hpctk.Half(), hpctk.TopK(0.2), hpctk.RandomK(0.2), hpctk.Sign(), hpctk.QSGD(6), hpctk.ChunkTopK(2, 8),
        )
    },
    "EF21 TopK": hpctk.EF21(hpctk.TopK(0.2)),
}  # fmt: skip


def after_five_steps(method, dense):
    """Return the digest of the parameters, and how far they are from those of the dense run."""
    made, _ = attached(method)
    train(made, 5)
    far = max(
        float((p.full_tensor() - q.full_tensor()).abs().max())
        for p, q in zip(made.parameters(), dense.parameters(), strict=True)
    )
    return digest(made), far


def main():
    found = {}
    dense = model(MESH)
    train(dense, 5)
    ours, _ = attached(hpctk.Mean())
    train(ours, 5)
    found["dense"], found["mean"] = digest(dense), digest(ours)

    found["methods"] = {name: after_five_steps(method, dense) for name, method in METHODS.items()}

    sparse, work = attached(hpctk.Mean(hpctk.TopK(0.2)))
    losses = train(sparse, 20)
    found["losses"], found["sent"] = (losses[0], losses[-1]), work.stats.sent_bytes
    kept = copy.deepcopy(work.state_dict())
    weights = copy.deepcopy(sparse.state_dict())
    train(sparse, 3, first=20)
    found["straight"] = digest(sparse)
    other, work = attached(hpctk.Mean(hpctk.TopK(0.2)))
    other.load_state_dict(weights)
    work.load_state_dict(kept)
    train(other, 3, first=20)
    found["resumed"] = digest(other)

    one, work = attached(hpctk.Mean(hpctk.TopK(0.2)))
    train(one, 4, bad_step=2)
    two, _ = attached(hpctk.Mean(hpctk.TopK(0.2)))
    train(two, 2)
    found["skipped"] = work.stats.counts["skipped_steps"]
    train(two, 1, first=3)
    found["with a bad step"], found["without it"] = digest(one), digest(two)

    attach = hpctk.fsdp.attach
    found["refused"] = {
        "both dimensions": refused(lambda: attach(dense, hpctk.Mean(), MESH)),
        "twice": refused(lambda: attach(one, hpctk.Mean(), MESH)),
        "not sharded": refused(lambda: attach(model(None), hpctk.Mean(), MESH)),
        "AdaCons": refused(lambda: attach(model(MESH["shard"]), hpctk.AdaCons(), MESH)),
        "SAEF": refused(lambda: attach(model(MESH["shard"]), hpctk.SAEF(hpctk.Sign()), MESH)),
        "clip": refused(lambda: attach(model(MESH["shard"]), hpctk.Mean(clip=1.0), MESH)),
        "PowerSGD": refused(lambda: attach(model(MESH["shard"]), hpctk.Mean(hpctk.PowerSGD(1)), MESH)),
        "mesh": refused(lambda: attach(model(MESH["shard"]), hpctk.Mean(), MESH["shard"])),
        "half": refused(lambda: attach(model(MESH["shard"]).bfloat16(), hpctk.Mean(), MESH)),
    }
    (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
