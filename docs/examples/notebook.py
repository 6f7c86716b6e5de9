"""Start a run from Python and read what it produced."""

from rlinf import api

run = api.run("reversal", {"seed": 1, "run.name": "seed1"}, config_dir="configs")

for row in run.metrics():
    print(row["iteration"], row["reward/mean"])
print([(row["version"], row["score"]) for row in run.evaluations()])

worst = min(run.rewards(0), key=lambda sample: sample.rewards.sum())
for sample in run.trajectories(0):
    if sample.identity.sample == worst.identity.sample:
        print(sample.prompt_text, sample.text, sample.logprobs.mean())

before, after = run.weights(0), run.weights()
print({name: (after[name] - before[name]).norm().item() for name in before})
