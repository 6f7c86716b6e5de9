"""Trainers: gradients, optimizer steps, checkpoints."""

from rlinf.registry import Registry

trainers = Registry(
    "trainer",
    {
        "deepspeed": "rlinf.trainers.deepspeed:DeepSpeedTrainer",
        "fsdp": "rlinf.trainers.fsdp:FSDPTrainer",
        "megatron": "rlinf.trainers.megatron.trainer:MegatronTrainer",
    },
    base="rlinf.trainers.base:Trainer",
)
