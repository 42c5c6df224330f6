"""Four ranks, two replicas of two shards: what each rank finds out, as FOLDER/RANK.json."""

import copy
import hashlib
import json
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import hpctk
from hpctk.errors import HpctkError

dist.init_process_group("gloo")
RANK, MESH = dist.get_rank(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def model(mesh, dtype=torch.float32, **sharding):
    torch.manual_seed(3)
    made = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5)).to(dtype)
    if mesh is not None:
        for layer in (made[0], made[2]):
            fully_shard(layer, mesh=mesh, **sharding)
        fully_shard(made, mesh=mesh, **sharding)
    return made


def batch(t):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * t + RANK))


def loss_of(made, x):
    return (made(x.to(made[0].weight.dtype)).float() - x[:, :5].sin()).square().mean()


def train(made, steps, first=0, bad_step=None):
    base, losses = torch.optim.SGD(made.parameters(), lr=0.1), []
    for t in range(first, first + steps):
        base.zero_grad()
        loss = loss_of(made, batch(t))
        (loss * float("nan") if t == bad_step and RANK == 3 else loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(made.parameters(), 1e9).full_tensor()
        if norm.isfinite():
            base.step()
        losses.append(float(loss.detach()))
    return losses


def digest(made):
    values = (p.full_tensor().detach().contiguous().view(torch.uint8) for p in made.parameters())
    whole = b"".join(x.numpy().tobytes() for x in values)
    return hashlib.sha256(whole).hexdigest()


def refused(make):
    try:
        make()
    except HpctkError as error:
        return str(error)
    return "not refused"


def attached(method, dtype=torch.float32, grad_scaler=None, **sharding):
    made = model(MESH["shard"], dtype, **sharding)
    return made, hpctk.fsdp.attach(made, method, MESH, grad_scaler=grad_scaler)


def train_scaled(method, scaler, steps, *, told, overflows=False):
    """Train; return the digest of the parameters and the scale after each step, and the backwards skipped here."""
    made, work = attached(method, grad_scaler=scaler if told else None)
    base, seen = torch.optim.SGD(made.parameters(), lr=0.1), []
    draws = random.Random(5)
    for t in range(steps):
        unlucky = {rank for rank in range(4) if overflows and draws.random() < 0.1}
        # Of the first layer, so that it gets no further: in one element of one shard.
        which = draws.randrange(16)
        spoil = (
            made[0].register_forward_hook(lambda *args, which=which: spoiled(args[-1], which))
            if RANK in unlucky
            else None
        )
        base.zero_grad()
        scaler.scale(loss_of(made, batch(t))).backward()
        scaler.step(base)
        scaler.update()
        seen.append((digest(made), scaler.get_scale()))
        if spoil is not None:
            spoil.remove()
    return seen, work.stats.counts["skipped_steps"]


def spoiled(output, which):
    gradient = torch.zeros_like(output)
    gradient[0, which] = torch.inf
    output.register_hook(lambda given: given + gradient)
    return output


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


def after_five_steps(method, dense, dtype=torch.float32):
    """Return the digest of the parameters, and how far they are from those of the dense run."""
    made, _ = attached(method, dtype)
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

    kinds = {"GradScaler": torch.amp.GradScaler, "ShardedGradScaler": ShardedGradScaler}
    found["scaled"] = {
        f"{kind}, {name}, {'told' if told else 'not told'}": train_scaled(
            METHODS[name], make("cpu", init_scale=64.0, growth_interval=3), 24, told=told, overflows=True
        )
        for kind, make in kinds.items()
        for name in ("all by Identity", "Mean TopK", "EF21 TopK")
        for told in (True, False)
    }
    found["at scales"] = {
        kind: [
            train_scaled(METHODS["Mean Half"], make("cpu", init_scale=scale, growth_interval=3), 8, told=True)[0][-1][0]
            for scale in (1.0, 2.0**4, 2.0**20)
        ]
        for kind, make in kinds.items()
    }

    for dtype in (torch.bfloat16, torch.float16):
        dense = model(MESH, dtype)
        train(dense, 5)
        ours, _ = attached(hpctk.Mean(), dtype)
        train(ours, 5)
        found[f"{dtype}"] = digest(dense), digest(ours)
        found[f"methods in {dtype}"] = {
            name: after_five_steps(method, dense, dtype) for name, method in METHODS.items()
        }
    half, work = attached(hpctk.Mean(hpctk.TopK(0.2)), torch.bfloat16)
    losses = train(half, 20)
    residuals = [x for row in work.state_dict().values() for x in row["residuals"].values()]
    found["half"] = losses[0], losses[-1], sorted({str(x.dtype) for x in residuals})
    found["policies"] = {}
    for reduced in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        dense = model(MESH, mp_policy=policy)
        train(dense, 5)
        ours, _ = attached(hpctk.Mean(), mp_policy=policy)
        train(ours, 5)
        found["policies"][f"{reduced}"] = digest(dense), digest(ours)

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
    }
    (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
