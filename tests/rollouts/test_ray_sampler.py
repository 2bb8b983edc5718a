"""Workers on a Ray cluster: one cluster for this file, and where it can be the same workers for several tests."""

import csv
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs the extra ray", allow_module_level=True)

from distributed import run_distributed
from ray_helpers import Obliging
from rlalign.algorithms.distributed_adaptive_po import DistributedAdaptivePO
from rlalign.cli import main
from rlalign.models.policy import Policy, PolicyConfig
from rlalign.rollouts.curriculum import StratifiedWorkers
from rlalign.rollouts.sampling.base import AheadSampler, SampleRequest, SamplingParams
from rlalign.rollouts.sampling.ray import RaySampler
from rlalign.rollouts.sampling.ray.weights import gather_weights, take_weights
from runs import fit, make_run, weights

ROOT = Path(__file__).parents[2]
PATH = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"


def of_rank(rank: int, model: str, prompts: str) -> tuple[list[float], int, float, dict]:
    """In a rank of its own: a run whose share of an iteration is drawn by a worker of this rank.

    What workers remember is in one of rank 0, and all ranks are told.
    """
    os.environ["PYTHONPATH"] = PATH
    sampler = RaySampler(num_workers=1, object_store_mb=100)
    trainer = {"max_epochs": 2, "strategy": "ddp", "devices": 2}
    by = StratifiedWorkers(num_workers=2)
    module, _, fitted = fit(model, prompts, DistributedAdaptivePO, trainer, sampler=sampler, curriculum=by)
    assert sampler.version == 2
    import ray

    stale = float(fitted.callback_metrics["rollout/staleness"])
    found = weights(module).tolist(), len(ray.nodes()), stale, ray.cluster_resources()
    torch.distributed.barrier()  # rank 0 has the cluster
    sampler.close()
    return found


def test_ranks_share_a_cluster_and_make_the_run_of_one(tiny_model, prompts_file):
    """First in this file: ranks are forked, which does not go with a cluster that this process is connected to."""
    by = StratifiedWorkers(num_workers=2)
    module, _, _ = fit(tiny_model, prompts_file, DistributedAdaptivePO, {"max_epochs": 2}, curriculum=by)
    found = run_distributed(of_rank, tiny_model, prompts_file, timeout=170)
    for got, nodes, staleness, resources in found:
        torch.testing.assert_close(torch.tensor(got), weights(module), atol=1e-6, rtol=1e-5)
        assert (nodes, staleness) == (1, 0)
        assert resources["CPU"] == max(os.cpu_count() or 1, 2)
        assert resources["object_store_memory"] == 100 << 20, "it was started as it was asked for"


@pytest.fixture(scope="module")
def cluster():
    """One that runs before there is a run, as docs/ray.md has it; its address."""
    import ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    command += [
        "--num-cpus=12",
        "--object-store-memory=100000000",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    environment = {"PYTHONPATH": PATH, "RAY_AUTH_MODE": "disabled"}
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as head,
    ):
        patch.setenv("RAY_AUTH_MODE", "disabled")
        assert head.stdout is not None
        assert any("Ray runtime started" in line for line in head.stdout), "it says so, or ends"
        yield f"127.0.0.1:{port}"
        ray.shutdown()
        head.terminate()
        head.stdout.read()


@pytest.fixture(scope="module")
def crew(cluster, tmp_path_factory):
    """Two workers with the local sampler, which can be asked to die."""
    folder = tmp_path_factory.mktemp("asked")
    options = {"cpus_per_worker": 2, "environment": {"MOOD": "fine"}, "address": cluster}
    sampler = RaySampler(2, sampler=Obliging(str(folder)), **options)
    yield sampler
    sampler.close()
    with pytest.raises(RuntimeError, match=r"Call sync\(policy\) first"):
        sampler.sample([], SamplingParams())


@pytest.fixture
def sampler(crew):
    """The same, as they come."""
    crew.staleness, crew.prompts_per_item = 0, 1
    return crew


def call_until_dead(worker) -> None:
    import ray

    while True:
        ray.get(worker.release.remote())


def drawn(data) -> list[tuple]:
    return [(r.prompt_index, r.sample_index, r.token_ids.tolist()) for r in data.last_rollouts]


def close(ours, theirs) -> None:
    for a, b in zip(ours.last_rollouts, theirs.last_rollouts, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-5, rtol=1e-4)


def test_synchronous_workers_make_the_run_of_none(tiny_model, prompts_file, sampler):
    options = {"num_held_out": 3, "val_samples": 2, "step_size": 8}
    trainer = {"max_epochs": 3, "check_val_every_n_epoch": 1}
    module, data, local = fit(tiny_model, prompts_file, trainer=trainer, **options)
    version = sampler.version
    theirs, ours, fitted = fit(tiny_model, prompts_file, trainer=trainer, sampler=sampler, **options)
    assert drawn(ours) == drawn(data)
    close(ours, data)
    assert torch.equal(weights(theirs), weights(module))
    assert fitted.callback_metrics["val/length_mean"] == local.callback_metrics["val/length_mean"]
    assert fitted.callback_metrics["rollout/staleness_max"] == 0
    assert sampler.version - version == 4, "the start, and after each iteration: validation draws by what comes next"
    assert isinstance(sampler, AheadSampler)


def test_workers_compute_in_the_type_of_the_run(tiny_model, prompts_file, sampler):
    options = {"trainer": {"max_epochs": 1, "precision": "bf16-mixed"}}
    module, data, _ = fit(tiny_model, prompts_file, **options)
    theirs, ours, _ = fit(tiny_model, prompts_file, sampler=sampler, **options)
    in_float32 = fit(tiny_model, prompts_file, trainer={"max_epochs": 1})[1]
    close(ours, data)
    apart = [
        (a.logprobs - b.logprobs).abs().max()
        for a, b in zip(ours.last_rollouts, in_float32.last_rollouts, strict=True)
        if a.token_ids.tolist() == b.token_ids.tolist()
    ]
    assert max(apart) > 1e-4
    assert torch.equal(weights(theirs), weights(module))


@pytest.mark.parametrize("staleness", [1, 4])
def test_responses_are_at_most_so_many_versions_old(tiny_model, prompts_file, sampler, staleness):
    sampler.staleness = staleness

    def run(**options):
        module, data, trainer = make_run(tiny_model, prompts_file, trainer={"max_epochs": 5}, **options)
        found = []
        end = module.on_train_batch_end

        def on_train_batch_end(outputs, batch, index):
            found.append(([(r.prompt_index, r.sample_index) for r in data.last_rollouts], batch.statistics))
            end(outputs, batch, index)

        module.on_train_batch_end = on_train_batch_end
        trainer.fit(module, data)
        return found

    plain = run()
    ahead = run(sampler=sampler, importance_cap=2.0)
    assert [asked for asked, _ in ahead] == [asked for asked, _ in plain]
    assert all(0 <= s["rollout/staleness"] <= s["rollout/staleness_max"] <= staleness for _, s in ahead)
    assert ahead[0][1]["rollout/staleness_max"] == 0


def test_what_dead_workers_were_at_is_drawn_by_others_and_counts_once(tiny_model, prompts_file, sampler):
    module, data, _ = fit(tiny_model, prompts_file, trainer={"max_epochs": 3})
    asked_to_die = [Path(sampler.sampler.folder) / f"die-{prompt}" for prompt in (1, 7)]
    for file in asked_to_die:
        file.touch()
    before = sampler.num_replaced
    theirs, ours, fitted = fit(tiny_model, prompts_file, trainer={"max_epochs": 3}, sampler=sampler)
    assert not any(file.exists() for file in asked_to_die)
    assert sampler.num_replaced == before + 2
    assert fitted.callback_metrics["rollout/workers_replaced"] == sampler.num_replaced
    assert drawn(ours) == drawn(data)
    assert torch.equal(weights(theirs), weights(module))


def test_what_a_worker_raises_ends_the_run_and_options_reach_it(tiny_model, prompts_file, sampler):
    (Path(sampler.sampler.folder) / "tell-12").touch()
    sampler.prompts_per_item, before = 3, sampler.num_replaced
    with pytest.raises(ValueError, match="mood fine, threads 2, rows 12"):
        fit(tiny_model, prompts_file, sampler=sampler)
    assert sampler.num_replaced == before
    fit(tiny_model, prompts_file, sampler=sampler)  # it goes on


def test_a_method_with_workers_keeps_what_they_remember_in_their_processes(tiny_model, tmp_path, sampler):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}", "level": {i % 2}}}\n' for i in range(12)))

    def run(**options):
        by = StratifiedWorkers("level", num_workers=2)
        return fit(tiny_model, str(path), DistributedAdaptivePO, {"max_epochs": 3}, curriculum=by, **options)

    module, data, _ = run()
    theirs, ours, _ = run(sampler=sampler)
    assert drawn(ours) == drawn(data)
    assert torch.equal(weights(theirs), weights(module))
    assert theirs.estimates == pytest.approx(module.estimates)
    assert {n: len(memory) for n, memory in theirs.memories.items()} == {0: 24, 1: 24}
    saved: dict = {}
    theirs.on_save_checkpoint(saved)
    first = sampler.crew.workers[0]
    import ray

    ray.kill(first)
    with pytest.raises(ray.exceptions.RayActorError):
        call_until_dead(first)
    assert {n: len(memory) for n, memory in theirs.memories.items()} == {0: 0, 1: 24}, "it dies with the worker"
    assert sampler.crew.workers[0] is not first
    theirs.on_load_checkpoint(saved)
    assert {n: len(memory) for n, memory in theirs.memories.items()} == {0: 24, 1: 24}
    assert theirs.estimates == pytest.approx(module.estimates)


def test_distributed_adaptive_po_has_workers_by_configuration_alone(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLALIGN_RUN", "")
    monkeypatch.delenv("RLALIGN_RUN")
    names = ("base", "distributed_adaptive_po", "samplers/ray", "samplers/ray_ahead")
    configs = [f"--config={ROOT / 'configs' / name}.yaml" for name in names]
    short = ["--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2", "--data.init_args.val_limit=4"]
    short += ["--data.init_args.prompts_per_iteration=4", "--data.init_args.group_size=2"]
    short += ["--data.init_args.step_size=null", "--data.init_args.sampler.init_args.num_workers=1"]
    short += [f"--data.init_args.sampler.init_args.address={cluster}"]
    assert main(["fit", *configs, "--run=short", *short, "--model.init_args.replay_share=1"]) == 0
    rows = list(csv.DictReader((tmp_path / "runs" / "short" / "metrics.csv").open()))
    assert float(rows[-1]["rollout/staleness_max"]) <= 1
    assert float(rows[-1]["rollout/replayed_share"]) > 0
    assert float(rows[-1]["rollout/curriculum/evenness"]) == 1


@pytest.mark.parametrize(
    ("policy", "names"), [({}, 20), ({"lora_rank": 2}, 28), ({"lora_rank": 2, "dtype": "bfloat16"}, 28)]
)
def test_a_replica_takes_over_what_differs_from_the_checkpoint(tiny_model, policy, names):
    original = Policy(PolicyConfig(tiny_model, **policy), seed=1)
    with torch.no_grad():
        for parameter in original.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    with original.whole() as model:
        sent = gather_weights(original, model)
        again = gather_weights(original, model)
    assert len(sent.layout) == names
    assert sent.equals(again)
    assert not sent.equals(None)
    replica = Policy(PolicyConfig(tiny_model, **policy), seed=2)
    take_weights(replica, sent)
    for (name, a), b in zip(original.lm.named_parameters(), replica.lm.parameters(), strict=True):
        assert torch.equal(a, b), name
    changed = original.to(torch.bfloat16)  # what a run with precision bf16-true makes of it
    take_weights(replica, gather_weights(changed, changed.model))
    assert {p.dtype for p in replica.lm.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        next(p for p in changed.parameters() if p.requires_grad).view(-1)[0] += 1
    assert not gather_weights(changed, changed.model).equals(gather_weights(replica, replica.model))


def test_too_few_processors_are_told(cluster, tiny_model, prompts_file):
    with pytest.raises(RuntimeError, match="need 13 CPUs of the Ray cluster, which has 12"):
        fit(tiny_model, prompts_file, sampler=RaySampler(num_workers=13, address=cluster))
    with pytest.raises(RuntimeError, match="need 1 GPUs of the Ray cluster, which has 0"):
        fit(tiny_model, prompts_file, sampler=RaySampler(2, address=cluster, gpus_per_worker=0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0}, "num_workers must be at least 1, got 0"),
        ({"staleness": -1}, "staleness must be at least 0, got -1"),
        ({"prompts_per_item": 0}, "prompts_per_item must be at least 1"),
        ({"max_deaths": 0}, "max_deaths must be at least 1"),
        ({"cpus_per_worker": -0.5}, "cpus_per_worker must be at least 0"),
        ({"gpus_per_worker": -1}, "gpus_per_worker must be at least 0"),
        ({"object_store_mb": 50}, "at least 80"),
        ({"object_store_mb": 100, "address": "auto"}, "leave out it, or address"),
    ],
)
def test_numbers_out_of_bounds_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        RaySampler(**options)


def test_nothing_is_drawn_before_there_are_weights():
    with pytest.raises(RuntimeError, match=r"Call sync\(policy\) first"):
        RaySampler().sample([SampleRequest((1,), 0, 0, 0)], SamplingParams())
