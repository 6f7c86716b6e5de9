"""Policies: the networks that are trained, with a common interface to trajectories."""

from rlinf.registry import Registry

policies = Registry(
    "model",
    {
        "causal_lm": "rlinf.models.causal_lm:CausalLM",
        "causal_lm_critic": "rlinf.models.causal_lm_critic:CausalLMCritic",
        "cnn": "rlinf.models.actor_critic:CNNPolicy",
        "flow": "rlinf.models.flow_policy:FlowPolicy",
        "gr00t": "rlinf.models.gr00t:Gr00tPolicy",
        "qwen2_5_vl": "rlinf.models.qwen2_5_vl:Qwen25VL",
        "mlp": "rlinf.models.actor_critic:MLPPolicy",
        "mlp_q": "rlinf.models.tanh_normal_q:MLPQPolicy",
        "openvla": "rlinf.models.openvla:OpenVLAPolicy",
        "openvla_oft": "rlinf.models.openvla:OpenVLAOFTPolicy",
        "pi0": "rlinf.models.pi0:Pi0Policy",
        "pi05": "rlinf.models.pi0:Pi05Policy",
        "smolvla": "rlinf.models.smolvla:SmolVLAPolicy",
        "wall_oss": "rlinf.models.wall_oss:WallOSSPolicy",
    },
    base="rlinf.models.base:Policy",
)
