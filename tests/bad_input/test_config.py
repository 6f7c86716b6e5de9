"""Bad values of configuration keys, and parts that do not go together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bad_input.door import GONE, Base, refused

VALUES: dict[str, list[Any]] = {
    "seed": [-1, 2**32, 1.5, True, "0", None, []],
    "iterations": [-1, -3, 2.5, True, "10", None, "many"],
    "flow": ["off_policy", 3],
    "run.name": ["", "../escape", "a/b", 7, None, "-x", ".hidden"],
    "run.root": [5, None],
    "rollout.batch_size": [0, -1, 1.5, True, "8", None, [], {}],
    "rollout.group_size": [0, -2, 2.5, True, "4", None],
    "rollout.horizon": [0, -1, 3.5, True, "12", None],
    "rollout.temperature": [-0.1, True, "1.0", None, float("nan"), float("inf")],
    "rollout.sampling": [True, "greedy", {"topk": 3}],
    "rollout.sampling.top_k": [-1, 1.5, True],
    "rollout.sampling.top_p": [0, 1.1, True],
    "rollout.sampling.min_p": [-0.1, 1.1, True],
    "rollout.sampling.min_tokens": [-1, True],
    "rollout.sampling.stop": ["text", [""], [3], True],
    "rollout.max_resamples": [0, -1, 1.5, True, "1"],
    "rollout.staleness": [-1, 65, 1.5, True, "1"],
    "rollout.in_flight_updates": [1, "true", True],
    "sft.max_steps": [-1, 1.5, True, "3"],
    "sft.batch_size": [0, True, "16"],
    "sft.lr": [0, -1e-3, "1e-3", True, float("nan")],
    "sft.eval_every": [0, True],
    "sft.target_score": [-0.1, 1.1, True, "0.5"],
    "evaluate.every": [-1, 1.5, True, "10"],
    "evaluate.samples": [0, -1, True, "512"],
    "evaluate.horizon": [0, True, "12"],
    "evaluate.temperature": [-1, True, "0"],
    "checkpoint.keep_last": [0, True, "2"],
    "checkpoint.keep_every": [-1, True],
    "checkpoint.keep_trajectories": [0, True],
    "device_memory_gib": [0, -1, True, "8", "8GB"],
    "algorithm.name": ["gpro", "trpo", 3, None],
    "optimizer.lr": [0, -1e-4, "1e-4", True, None, float("inf")],
    "optimizer.name": ["adam", True],
    "optimizer.group_lr": [{"policy": 0}, {"policy": "1"}, 1e-3],
    "optimizer.group_clip_grad": [{"policy": 0}, {"policy": "1"}, 1.0],
    "optimizer.lr_scheduler_type": ["cosin", True, None],
    "optimizer.lr_warmup_iterations": [-1, 2.5, True],
    "optimizer.min_lr_ratio": [-0.1, 1.5, True],
    "optimizer.betas": [[0.9], [0.9, 1.0], [1.5, 0.9], [-0.1, 0.9], 0.9, ["a", "b"], [True, 0.9]],
    "optimizer.eps": [0, -1e-8, True],
    "optimizer.weight_decay": [-0.1, True],
    "optimizer.clip_grad": [0, -1, True],
    "algorithm.epochs": [0, 1.5, True],
    "algorithm.minibatches": [0, 3, True, "2"],
    "algorithm.old_logprobs": ["rolout", True],
    "algorithm.rollout_is_threshold": [0, -1, True],
    "algorithm.loss_agg_mode": ["mean", True],
    "algorithm.clip_ratio_low": [5, 0, -0.2, True],
    "algorithm.clip_ratio_high": [0, -0.2, True],
    "algorithm.entropy_coeff": [-0.1, True],
    "algorithm.kl_loss_coef": [-0.1, True],
    "algorithm.kl_loss_type": ["k4", "low_var_kl", True],
    "algorithm.norm_adv_by_std": [1, "yes"],
    "algorithm.filter_zero_variance_groups": [0, "no"],
    "algorithm.whiten_advantages": [1, "yes"],
    "algorithm.min_group_reward": [True, "0.1", float("nan"), float("inf")],
    "model.name": ["causal", "mlpp", None],
    "model.architecture": ["qwen9", True],
    "model.hidden": [0, -32, 33, True, "32"],
    "model.layers": [0, True, "2"],
    "model.heads": [0, 3, 32, True],
    "model.kv_heads": [0, 3, True],
    "model.intermediate": [0, True],
    "model.max_position_embeddings": [0, 8, True],
    "model.dtype": ["float16", "fp32", True],
    "model.trust_remote_code": [1, "true"],
    "task.name": ["arithmetc", "gsm8k", None],
    "task.operations": ["/", "", True],
    "task.digits": [[], [0], [7], 2, ["1"], [True]],
    "task.digit_weights": [[1.0], [1.0, -1.0], [0.0, 0.0], [True, 1.0]],
    "task.rambling_fraction": [1.0, -0.1, True],
    "task.test_seed": [-1, True],
    "reward.name": ["scores", None],
    "reward.scale": [True, "1", None],
    "engine.name": ["transformer", "vllm9", None],
    "engine.max_num_seqs": [0, True],
    "engine.max_num_batched_tokens": [0, 255, True],
    "engine.kv_cache_gib": [0, True],
    "engine.threads": [0, True],
    "engine.device": ["cuda:99", "gpu", "mps", "cuda:x", 0, True],
    "engine.dtype": ["float16", True],
    "engine.ignore_eos": [1],
    "trainer.name": ["fsdp2", None],
    "trainer.max_tokens_per_microbatch": [0, True, "8192"],
    "trainer.cpu_threads": [0, True],
    "trainer.device": ["cuda:99", "tpu", 1],
    "trainer.param_dtype": ["float8", True],
    "trainer.initial_loss_scale": [0.5, True],
    "trainer.loss_scale_window": [0, True],
    "trainer.packing": [1, "true"],
    "trainer.reduce_dtype": ["float16", True],
    "trainer.dp_replicate": [0, True],
    "trainer.gradient_checkpointing": [1, "true"],
    "trainer.offload_optimizer": [1, "true"],
    "trainer.fsdp_wrap_min_mb": [-1, True],
    "cluster": [[], "local", None, 3],
    "cluster.launcher": ["slrum", "Slurm", None, True],
    "cluster.poll_interval_s": [0, -1, True, "1"],
    "cluster.max_retries": [-1, True],
    "cluster.env": [["A=1"], {"A": 1}],
    "cluster.site": ["/no/site.yaml", True],
    "log": [[], "tensorboard"],
    "log.trackers": ["tensorboard", ["wandbb"], ["tensorboards"], [1]],
    "log.wandb": [{"project": "sums"}, {"projekt": "sums"}, "sums"],
    "log.wandb.mode": ["onlin", True],
    "log.mlflow": [{"experiment": "sums"}, {"uri": "http://here"}],
    "log.trackio": [{"project": "sums"}, {"projekt": "sums"}],
    "log.samples": [-1, True, "8"],
    "log.samples_every": [0, True],
    "plan": [5, [], True],
    "task": [None, [], "arithmetic"],
    "rollout": [None, []],
    "algorithm": [GONE],
    "run": [GONE],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(key, value, id=f"{key}={'missing' if value is GONE else repr(value)}")
        for key, values in VALUES.items()
        for value in values
    ],
)
def test_a_bad_value_is_refused_by_its_key(base: Base, key: str, value: Any) -> None:
    refused(base("arithmetic", {key: value}), key)


UNKNOWN = [
    ("sede", "seed"),
    ("iteration", "iterations"),
    ("rollouts", "rollout"),
    ("run.nam", "name"),
    ("rollout.batchsize", "batch_size"),
    ("sft.steps", "max_steps"),
    ("evaluate.sample", "samples"),
    ("checkpoint.keeplast", "keep_last"),
    ("algorithm.epoch", "epochs"),
    ("optimizer.lrr", "lr"),
    ("model.hiden", "hidden"),
    ("task.digit", "digits"),
    ("reward.scal", "scale"),
    ("engine.max_num_seq", "max_num_seqs"),
    ("trainer.max_token_per_microbatch", "max_tokens_per_microbatch"),
    ("cluster.launch", "launcher"),
    ("log.tracker", "trackers"),
]


@pytest.mark.parametrize(("key", "meant"), UNKNOWN, ids=[key for key, _ in UNKNOWN])
def test_an_unknown_key_gets_the_nearest(base: Base, key: str, meant: str) -> None:
    refused(base("arithmetic", {key: 1}), key, f"did you mean {meant!r}")


GREEDY = {"rollout.temperature": 0}
DIRECT = {"engine": {"name": "direct"}}
MLP = {"model": {"name": "mlp"}}
LANGUAGE = {"model": {"name": "causal_lm", "hidden": 32, "heads": 2}}
DECODING = {"engine": {"name": "transformers"}}
TOGETHER: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("greedy-groups", "arithmetic", GREEDY, ["rollout.temperature 0", "group_size"]),
    ("rate", "arithmetic", {"algorithm.lr": 1e-3}, ["algorithm.lr", "it is optimizer.lr"]),
    (
        "group",
        "arithmetic",
        {"optimizer.group_lr": {"critic": 1e-3}},
        ["optimizer.group_lr.critic", "causal_lm has no such parameter group", "policy"],
    ),
    (
        "group-clip",
        "arithmetic",
        {"optimizer.group_clip_grad": {"value": 1.0}},
        ["optimizer.group_clip_grad.value", "causal_lm has no such parameter group", "policy"],
    ),
    ("cut", "arithmetic", {"algorithm.minibatches": 5}, ["algorithm.minibatches", "5 equal"]),
    (
        "in-flight",
        "arithmetic",
        {"rollout.in_flight_updates": True},
        ["rollout.in_flight_updates", "staleness is 0"],
    ),
    (
        "cap",
        "arithmetic",
        {"algorithm.rollout_is_threshold": 2.0, "algorithm.old_logprobs": "rollout"},
        ["algorithm", "old_logprobs: recompute"],
    ),
    (
        "kl-reward",
        "arithmetic",
        {"algorithm.kl_reward_coef": 0.1, "algorithm.old_logprobs": "interpolate"},
        ["algorithm", "kl_reward_coef is of the policy before the update", "recompute"],
    ),
    (
        "lora-values",
        "cartpole",
        {"trainer.lora": {"rank": 2}},
        ["trainer.lora: adapters do not train the value head", "trainer.lora=null"],
    ),
    ("python-empty", "cartpole", {"task.python": ""}, ["task.python: is empty"]),
    (
        "ppo-text",
        "arithmetic",
        {"algorithm": {"name": "ppo"}},
        ["algorithm.name: 'ppo' needs value estimates", "alternatives: ", "grpo"],
    ),
    (
        "environment-text",
        "arithmetic",
        {"reward": {"name": "environment"}},
        ["reward.name: 'environment' needs rewards", "score"],
    ),
    (
        "direct-text",
        "arithmetic",
        DIRECT,
        ["engine.name: 'direct'", "alternatives:", "transformers"],
    ),
    ("mlp-text", "arithmetic", MLP, ["model.name: 'mlp' needs observation", "causal_lm"]),
    ("mlp-direct-text", "arithmetic", {**MLP, **DIRECT}, ["model.name: 'mlp'"]),
    (
        "lm-simulator",
        "cartpole",
        LANGUAGE,
        ["model.name: 'causal_lm'", "alternatives: cnn, flow, gr00t, mlp"],
    ),
    ("decoding-simulator", "cartpole", DECODING, ["engine.name: 'transformers'", "direct"]),
    (
        "digits-simulator",
        "cartpole",
        {"reward": {"name": "digits"}},
        ["reward.name: 'digits' needs reference answers", "environment"],
    ),
    ("sft-simulator", "cartpole", {"sft.max_steps": 5}, ["sft.max_steps"]),
    (
        "sampling-simulator",
        "cartpole",
        {"rollout.sampling.top_p": 0.9},
        ["rollout.sampling.top_p", "samples no tokens"],
    ),
    ("no-kind", "cartpole", {"task.action": {"size": 2}}, ["task.action.kind"]),
    ("no-id", "cartpole", {"task.id": ""}, ["task.id"]),
    ("kwargs-list", "cartpole", {"task.kwargs": []}, ["task.kwargs"]),
    ("processes", "cartpole", {"task.num_processes": -1}, ["task.num_processes"]),
    ("python", "cartpole", {"task.python": "nothere"}, ["task.python", "make env NAME=nothere"]),
    ("python-path", "cartpole", {"task.python": "/no/python"}, ["task.python: there is no"]),
    ("text-python", "arithmetic", {"task.python": "/bin/sh"}, ["task.python: unknown key"]),
    ("at-once", "cartpole", {"task.max_parallel_envs": 0}, ["task.max_parallel_envs"]),
    ("double_buffer", "cartpole", {"task.double_buffer": 3}, ["task.double_buffer"]),
    ("hidden", "cartpole", {"model.hidden": [64, 0]}, ["model.hidden.1"]),
    ("hidden-text", "cartpole", {"model.hidden": ["64"]}, ["model.hidden.0"]),
    ("gamma", "cartpole", {"algorithm.gamma": 1.5}, ["algorithm.gamma"]),
    ("lambda", "cartpole", {"algorithm.gae_lambda": -1}, ["algorithm.gae_lambda"]),
    (
        "valued-actions",
        "cartpole",
        {"model.value_level": "action"},
        ["model", "set chunk_size above 1"],
    ),
    (
        "valued-chunks",
        "cartpole",
        {"model.value_level": "action", "model.chunk_size": 4},
        ["model.value_level", "algorithm.logprob_level=chunk", "action or token"],
    ),
    (
        "valued-for-nothing",
        "cartpole",
        {
            "model.value_level": "action",
            "model.chunk_size": 4,
            "algorithm": {"name": "reinforce_plus_plus", "logprob_level": "action"},
        },
        ["model.value_level", "'reinforce_plus_plus' has none"],
    ),
    ("value-level", "cartpole", {"model.value_level": "token"}, ["model.value_level"]),
    ("value-clip", "cartpole", {"algorithm.cliprange_value": 0}, ["algorithm.cliprange_value"]),
    (
        "ppo-normalise",
        "cartpole",
        {"algorithm.norm_adv_by_std": True},
        ["algorithm.norm_adv_by_std"],
    ),
    ("horizon", "arithmetic", {"rollout.horizon": 600}, ["rollout.horizon", "512 positions"]),
    ("evaluated", "arithmetic", {"evaluate.horizon": 600}, ["evaluate.horizon", "512 positions"]),
    ("edge", "arithmetic", {"rollout.horizon": 507}, ["rollout.horizon", "up to 6 tokens"]),
    ("wandb", "arithmetic", {"log.trackers": ["wandb"]}, ["log.trackers", "rlinf-slurm[wandb]"]),
    ("mlflow", "arithmetic", {"log.trackers": ["mlflow"]}, ["log.trackers", "rlinf-slurm[mlflow]"]),
]


@pytest.mark.parametrize(
    ("experiment", "changes", "words"),
    [pytest.param(*row[1:], id=row[0]) for row in TOGETHER],
)
def test_what_does_not_go_together_is_refused(
    base: Base,
    experiment: str,
    changes: dict[str, Any],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "log.trackers" in changes:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(base(experiment, changes), *words)


@pytest.mark.parametrize("experiment", ["arithmetic", "cartpole", "jsonl"])
def test_what_the_rows_change_is_accepted_as_it_is(base: Base, experiment: str) -> None:
    from pipeline.commands.experiment import prepare_run

    assert prepare_run(base(experiment, {})).folder.is_dir()


def test_a_root_that_cannot_be_written(base: Base) -> None:
    refused(base("arithmetic", {"run.root": "/proc/runs"}), "run.root")


def test_a_root_that_is_a_file(base: Base, files: Any) -> None:
    refused(base("arithmetic", {"run.root": str(files / "train.jsonl")}), "run.root")
