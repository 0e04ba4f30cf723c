"""Chat templates in the style of well-known model families, written from their public prompt formats.

Each does to messages what its family's template does (trimming, folding the system prompt, refusing roles, serialising
tools, cutting out thinking), since that is what locating contents has to survive.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    name: str
    text: str
    control: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    bos: str = "<|im_start|>"
    eos: str = "<|im_end|>"

    def with_ends(self) -> str:
        """The template, which sets its own BOS and EOS so that one tokenizer can serve all of them."""
        return f"{{%- set bos_token = '{self.bos}' %}}{{%- set eos_token = '{self.eos}' %}}{self.text}"


CHATML = Template(
    "chatml",
    """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
)

LLAMA2 = Template(
    "llama2",
    """{%- if messages[0].role == 'system' %}
{%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}
{{- bos_token + '[INST] ' + ((system if loop.first else '') + m.content).strip() + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}
{%- else %}{{ raise_exception('unknown role') }}{% endif %}
{%- endfor %}""",
    ("<s>", "</s>"),
    "<s>",
    "</s>",
)

_LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)

LLAMA3 = Template(
    "llama3",
    """{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    _LLAMA3_TOKENS,
    "<|begin_of_text|>",
    "<|eot_id|>",
)

LLAMA31 = Template(
    "llama31",
    """{{- bos_token }}
{%- set date = date_string if date_string is defined else '26 Jul 2024' %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{ 'Environment: ipython\n' }}{% endif %}
{{- 'Today Date: ' + date + '\n\n' + system + '<|eot_id|>' }}
{%- for m in rest %}
{%- if loop.first and tools and m.role == 'user' %}
{{- '<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, answer with a JSON call.\n\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}
{{- m.content | trim + '<|eot_id|>' }}
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    _LLAMA3_TOKENS,
    "<|begin_of_text|>",
    "<|eot_id|>",
)

_QWEN_TOOLS = """{%- macro system_with_tools(first) %}
{{- '<|im_start|>system\n' + first + '\n\n# Tools\n\nSignatures within <tools></tools>:\n<tools>' }}
{%- for t in tools %}{{ '\n' + t | tojson }}{% endfor %}
{{- '\n</tools>\n\nReturn calls within <tool_call></tool_call>.<|im_end|>\n' }}
{%- endmacro %}
{%- macro calls(m) %}
{%- for call in m.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{%- endmacro %}
"""

_QWEN_TOOL_RESULT = """
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
"""

QWEN25 = Template(
    "qwen25",
    _QWEN_TOOLS
    + """{%- set first = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{%- if tools %}{{ system_with_tools(first) }}{% else %}{{ '<|im_start|>system\n' + first + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role in ['user', 'system'] or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant' + ('\n' + m.content if m.content else '') + calls(m) + '<|im_end|>\n' }}"""
    + _QWEN_TOOL_RESULT
    + """{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
)

QWEN3 = Template(
    "qwen3",
    _QWEN_TOOLS
    + """{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}{{ system_with_tools(first) }}
{%- elif first %}{{ '<|im_start|>system\n' + first + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}
{%- if not ns.found and m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.found = true %}{% set ns.last = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role in ['user', 'system'] %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content %}{% set thinking = '' %}
{%- if m.reasoning_content is string %}{% set thinking = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thinking = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thinking) %}
{{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif %}
{{- calls(m) + '<|im_end|>\n' }}"""
    + _QWEN_TOOL_RESULT
    + """{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}""",
)

MISTRAL = Template(
    "mistral",
    """{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role not in ['user', 'assistant'] or (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + (system if loop.last else '') + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}""",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    "<s>",
    "</s>",
)

GEMMA = Template(
    "gemma",
    """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<bos>",
    "<eos>",
)

PHI3 = Template(
    "phi3",
    """{% for m in messages %}
{%- if m.role in ['system', 'user', 'assistant'] %}{{ '<|' + m.role + '|>\n' + m.content.strip() + '<|end|>\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}""",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    "<|endoftext|>",
    "<|endoftext|>",
)

ZEPHYR = Template(
    "zephyr",
    """{% for m in messages %}
{% if m.role in ['user', 'system', 'assistant'] %}
{{ '<|' + m.role + '|>\n' + m.content + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    ("<s>", "</s>"),
    "<s>",
    "</s>",
)

HERMES = Template(
    "hermes",
    """{{- '<|im_start|>system\n' }}
{%- if tools %}{{ 'You are a function calling AI model. Functions: <tools> ' }}
{%- for t in tools %}{{ t.function.name + ': ' + t | tojson + '\n' }}{% endfor %}{{ ' </tools>' }}{% endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>tool\n<tool_response>\n{"name": "' + (m.name or '') + '", "content": ' + m.content | tojson }}
{{- '}\n</tool_response><|im_end|>\n' }}
{%- elif m.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- for call in m.tool_calls %}
{{- '\n<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
)

DEEPSEEK = Template(
    "deepseek",
    """{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1] %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}""",
    (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
)

VICUNA = Template(
    "vicuna",
    """{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content + '\n\n' }}
{%- elif m.role == 'user' %}{{ 'USER: ' + m.content + '\n' }}
{%- else %}{{ 'ASSISTANT: ' + m.content + '</s>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}""",
    ("<s>", "</s>"),
    "<s>",
    "</s>",
)

SMOLLM2 = Template(
    "smollm2",
    """{% for m in messages %}
{%- if loop.first and m.role != 'system' %}
{{- '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}
{%- endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
)

YI = Template(
    "yi",
    """{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n<|im_start|>assistant\n' }}
{%- elif m.role == 'assistant' %}{{ m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}""",
    ("<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
)

_MISTRAL_TOOL_TOKENS = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)

MISTRAL_TOOLS = Template(
    "mistral with tools",
    """{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- set ns = namespace(turn=0, last=-1) %}
{%- for m in rest %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('user and assistant must alternate') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}
{%- endif %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if loop.index0 == ns.last %}
{%- if tools %}
{{- '[AVAILABLE_TOOLS] [' }}{% for t in tools %}{{ t | tojson + (', ' if not loop.last else '') }}{% endfor %}
{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}{{ '[INST] ' + system + m.content + '[/INST]' }}
{%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{{- ', ' if not loop.last else '' }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}
{%- else %}{{ raise_exception('unknown role') }}{% endif %}
{%- endfor %}""",
    _MISTRAL_TOOL_TOKENS,
    "<s>",
    "</s>",
)

GEMMA3 = Template(
    "gemma3",
    """{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- if messages[0].content is string %}{% set first = messages[0].content + '\n\n' %}
{%- else %}{% set first = messages[0].content[0].text + '\n\n' %}{% endif %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') }}
{%- if m.content is string %}{{ m.content | trim }}
{%- elif m.content is iterable %}
{%- for part in m.content %}{{ '<start_of_image>' if part.type == 'image' else part.text | trim }}{% endfor %}
{%- endif %}{{ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
    "<bos>",
    "<eos>",
)

PHI4 = Template(
    "phi4",
    """{% for m in messages %}
{%- if m.role in ['system', 'user', 'assistant'] %}
{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    ("<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|endoftext|>"),
)

COMMAND_R = Template(
    "command-r",
    """{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- if system %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system + '<|END_OF_TURN_TOKEN|>' }}
{%- endif %}
{%- for m in rest %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set speaker = '<|USER_TOKEN|>' if m.role == 'user' else '<|CHATBOT_TOKEN|>' %}
{{- '<|START_OF_TURN_TOKEN|>' + speaker + m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}""",
    (
        "<BOS_TOKEN>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
    ),
    "<BOS_TOKEN>",
    "<|END_OF_TURN_TOKEN|>",
)

FALCON = Template(
    "falcon",
    """{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content.strip() %}{% set rest = messages[1:] %}
{%- else %}{% set system = '' %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
{%- set content = m.content.replace('\r\n', '\n').replace('\n\n', '\n').strip() %}
{%- if loop.first and system %}{{ system + '\n\n' }}{% endif %}
{%- if m.role == 'user' %}{{ 'User: ' + content }}
{%- elif m.role == 'assistant' %}{{ '\n\nAssistant: ' + content + '\n\n' }}
{%- else %}{{ '\n\n' + m.role | capitalize + ': ' + content + '\n\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}""",
    ("<|endoftext|>",),
    "<|endoftext|>",
    "<|endoftext|>",
)

GRANITE = Template(
    "granite",
    """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}
{%- set system = "Knowledge cutoff: April 2024.\nToday's date: " + strftime_now('%B %d, %Y') + '.' %}
{%- set rest = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}
{%- if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\n' }}{% endif %}
{%- for m in rest %}
{%- if m.role == 'tool' %}
{{- '<|start_of_role|>tool_response<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}
{%- elif m.tool_calls %}
{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}
{{- m.tool_calls | map(attribute='function') | list | tojson + '<|end_of_text|>\n' }}
{%- else %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}""",
    ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
    "<|end_of_text|>",
    "<|end_of_text|>",
)

OLMO = Template(
    "olmo",
    """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>\n' + m.content + (eos_token if not loop.last else '') + '\n' }}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
{%- endfor %}""",
    ("<|endoftext|>",),
    "<|endoftext|>",
    "<|endoftext|>",
)

DEEPSEEK_R1 = Template(
    "deepseek-r1",
    """{%- set ns = namespace(system='', after_tool=false) %}
{%- for m in messages if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{% endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.after_tool = false %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
{{- call.function.arguments | tojson + '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}
{{- (content if ns.after_tool else '<｜Assistant｜>' + content) + '<｜end▁of▁sentence｜>' }}
{%- set ns.after_tool = false %}
{%- elif m.role == 'tool' %}
{{- '<｜tool▁outputs▁begin｜>' if not ns.after_tool else '\n' }}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% set ns.after_tool = true %}
{%- endif %}
{%- endfor %}
{%- if ns.after_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.after_tool %}{{ '<｜Assistant｜><think>\n' }}{% endif %}""",
    (
        *DEEPSEEK.control,
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
    ),
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
)

ALPACA = Template(
    "alpaca",
    """{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content.rstrip() + '\n\n' }}
{%- elif m.role == 'user' %}{{ '### Instruction:\n' + m.content.strip() + '\n\n' }}
{%- elif m.role == 'tool' %}{{ '### Input:\n' + m.content.strip() + '\n\n' }}
{%- else %}{{ '### Response:\n' + m.content.strip() + '\n\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}""",
    ("<s>", "</s>"),
    "<s>",
    "</s>",
)

TEMPLATES = (
    CHATML,
    LLAMA2,
    LLAMA3,
    LLAMA31,
    QWEN25,
    QWEN3,
    MISTRAL,
    GEMMA,
    PHI3,
    ZEPHYR,
    HERMES,
    DEEPSEEK,
    VICUNA,
    SMOLLM2,
    YI,
    MISTRAL_TOOLS,
    GEMMA3,
    PHI4,
    COMMAND_R,
    FALCON,
    GRANITE,
    OLMO,
    DEEPSEEK_R1,
    ALPACA,
)

_LOOP = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (CONTENT) + '<|im_end|>\n' }}{% endfor %}"

HOSTILE = {
    "upper": _LOOP.replace("CONTENT", "m.content | upper"),
    "truncates": _LOOP.replace("CONTENT", "m.content[:40]"),
    "counts": _LOOP.replace("CONTENT", "(m.content | length | string) + ' ' + m.content"),
    "reverses": _LOOP.replace("CONTENT", "m.content[::-1]"),
    "twice": _LOOP.replace("CONTENT", "m.content + '\n' + m.content"),
    "drops users": _LOOP.replace("CONTENT", "'' if m.role == 'user' else m.content"),
    "tests": _LOOP.replace("CONTENT", "('question: ' if m.content.startswith('What') else '') + m.content"),
    "refuses digits": _LOOP.replace("CONTENT", "raise_exception('no') if 'K' in m.content else m.content"),
    "words": _LOOP.replace("CONTENT", "m.content.split() | join(' ')"),
    "json": _LOOP.replace("CONTENT", "m.content | tojson"),
    "swaps": _LOOP.replace("CONTENT", "m.content.replace('e', 'é')"),
}
"""Templates that do to contents what should defeat locating them, wholly or in part."""
