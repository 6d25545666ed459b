"""Chat templates of published models, shortened, and a tokenizer of bytes with their special tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import byte_level

CALLS = (
    "{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content, thought = m.content, m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ content }}" + CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}"}{% elif m.role == \'tool\' %}{{ m.content | tojson }}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %} [TOOL_CALLS] [{{ m.tool_calls[0].function.name }}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# The assistant's header, only in messages: no prompts for an answer, or none after an answer.
HEADERS = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor %}"
ZEPHYR = HEADERS.replace(
    "{% endfor %}",
    "{% if loop.last and m.role != 'assistant' and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}",
)
SPECIAL = {
    "<|im_end|>": ("<|im_start|>", CHATML, QWEN3),
    "<|eot_id|>": ("<|start_header_id|>", LLAMA3),
    "<end_of_turn>": ("<start_of_turn>", GEMMA),
    "</s>": ("[INST]", MISTRAL, HEADERS, ZEPHYR),
}


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer with this template. Each byte is a token; the model's special tokens are there too."""
    tokenizer = byte_level()
    end, begin = next((end, begin) for end, (begin, *templates) in SPECIAL.items() if template in templates)
    tokenizer.add_special_tokens({"eos_token": end, "additional_special_tokens": [begin]})
    tokenizer.chat_template = template
    return tokenizer
