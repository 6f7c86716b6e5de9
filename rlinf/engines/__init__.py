"""Engines: they answer prompts with tokens, and observations with actions."""

from rlinf.registry import Registry

engines = Registry(
    "engine",
    {
        "transformers": "rlinf.engines.transformers:TransformersEngine",
        "direct": "rlinf.engines.direct:DirectEngine",
        "sglang": "rlinf.engines.sglang:SGLangEngine",
        "sglang_in_process": "rlinf.engines.sglang:SGLangInProcessEngine",
        "vllm": "rlinf.engines.vllm:VLLMEngine",
        "vllm_in_process": "rlinf.engines.vllm:VLLMInProcessEngine",
    },
    base="rlinf.engines.base:Engine",
)
