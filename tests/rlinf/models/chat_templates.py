"""Chat templates in our own words, each with a way of published ones."""

from __future__ import annotations

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLIT = (
    "{% set thought = '' %}{% set said = m.content %}"
    "{% if m.reasoning_content %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set said = said.split('</think>')[-1] | trim %}{% endif %}"
)
"""Takes an answer apart, as templates of reasoning models do."""
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    + SPLIT
    + "{% if "
    "loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""Qwen3: thoughts of the last answer alone; ``enable_thinking=False`` closes one."""
OPENS = FORGETS.replace(
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}",
)
"""Qwen3.5, Qwen3.6: the prompt opens the thought."""
CLOSES = OPENS.replace(
    "enable_thinking is defined and not enable_thinking",
    "not (enable_thinking is defined and enable_thinking)",
)
"""Small Qwen3.5: the prompt closes the thought unless told otherwise."""
NEXT_TURN_ENDS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n" + SPLIT + "<think>"
    "{% if loop.last %}{{ thought }}{% endif %}</think>\n{{ said }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM: nothing behind an answer; the next message's header ends it."""
SHORTENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if '</think>' in m.content %}{{ m.content if loop.last else '<think></think>' + "
    "m.content.split('</think>')[-1] | trim }}{% else %}<think></think>{{ m.content }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Nemotron 3: an answer without a thought is written otherwise than it is asked for."""
DROPS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{{ m.content.split('</think>')[-1] | trim }}{{ eos_token }}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""DeepSeek-R1: thoughts are dropped everywhere, and opened by the prompt."""
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.last and m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""gpt-oss (harmony): the last answer ends otherwise than earlier ones."""
TWO_ENDS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
"""Phi-3: the end of the text stands behind the end of the turn."""
NESTED_ENDS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|><|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)
"""Command-R7B: two special tokens behind each answer, of which the second ends responses."""
INSTRUCTIONS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
"""Llama 2, Mistral: no header before an answer, EOS behind it, no system message."""
HEADERS = (
    "{% for m in messages %}{{ (bos_token if loop.first else '') + '<|start|>' + m.role + "
    "'<|message|>\n\n' + m.content | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>\n\n{% endif %}"
)
"""Llama 3: content is trimmed, BOS once."""
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Vicuna-like: no special token."""
SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|start|>"),
    *("<|end|>", "<|return|>", "<|channel|>", "<|message|>", "<|endoftext|>", "<s>"),
)
