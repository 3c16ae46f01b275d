"""Chat templates in the forms of published models. ``[[`` and ``]]`` enclose the text of the
assistant; `written` replaces them by nothing or by the tags of a generation block."""

from __future__ import annotations

QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n') %}
            {%- set reasoning = reasoning.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}[[
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}
                {{- '\n' }}
            {%- endif %}
            {%- if call.function %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}]]
        {{- '\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

LLAMA3 = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}
        {{- raise_exception("Cannot put tools in the first user message when there is none") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nUse these functions:\n\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + "\n\n" }}
    {%- endfor %}
    {{- messages[0].content | trim + "<|eot_id|>" }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {{- message.content | tojson + "<|eot_id|>" }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}[[
        {%- if message.tool_calls %}
            {%- if message.tool_calls | length != 1 %}
                {{- raise_exception("This model only supports single tool-calls at once!") }}
            {%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
            {{- "<|eom_id|>" }}
        {%- else %}
            {{- message.content | trim + '<|eot_id|>' }}
        {%- endif %}]]
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

#: Tools go in front of the last question, a system turn into it where no answer follows.
MISTRAL = r"""
{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set questions = turns | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in turns %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message.role == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("conversation roles must alternate user/assistant/user/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == "user" %}
        {%- if tools is not none and message == questions[-1] %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\n\n" + message.content + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message.content + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined %}[[
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be strings with length 9!") }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- "]" + eos_token if loop.last else ", " }}
        {%- endfor %}]]
    {%- elif message.role == "assistant" %}[[
        {{- " " + message.content | trim + eos_token }}]]
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string }}
        {{- ', "call_id": "x"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

#: The header of an answer to come has more than that of an answer; all system turns come first.
DEEPSEEK = r"""
{%- set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system='') %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set ns.system = ns.system + ('\n\n' if ns.system else '') + message['content'] %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}
        {{- '<｜User｜>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' in message %}
        {%- set ns.is_tool = false %}
        {%- if not ns.is_first %}
            {{- '<｜Assistant｜>' }}
        {%- endif %}[[
        {%- for tool in message['tool_calls'] %}
            {%- if not ns.is_first %}
                {{- (message['content'] or '') + '<｜tool▁calls▁begin｜>' }}
                {%- set ns.is_first = true %}
            {%- else %}
                {{- '\n' }}
            {%- endif %}
            {%- set call = tool['function'] %}
            {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + call['name'] }}
            {{- '\n```json\n' + call['arguments'] | tojson + '\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}]]
    {%- endif %}
    {%- if message['role'] == 'assistant' and 'tool_calls' not in message %}
        {%- set content = message['content'].split('</think>')[-1] %}
        {{- '<｜tool▁outputs▁end｜>' if ns.is_tool else '<｜Assistant｜>' }}[[
        {{- content + '<｜end▁of▁sentence｜>' }}]]
        {%- set ns.is_tool = false %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- set ns.is_tool = true %}
        {%- if ns.is_output_first %}
            {{- '<｜tool▁outputs▁begin｜>' }}
            {%- set ns.is_output_first = false %}
        {%- endif %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.is_tool %}
    {{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}
    {{- '<｜Assistant｜><think>\n' }}
{%- endif %}
"""

#: Without a special token: a line a turn, whose end ends it.
PLAIN = r"""
{%- for message in messages %}
    {{- message.role + ': ' }}
    {%- if message.role == 'assistant' %}[[
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- ' CALL ' + call.function | tojson }}
        {%- endfor %}
        {{- '\n' }}]]
    {%- else %}
        {{- message.content + '\n' }}
    {%- endif %}
{%- endfor %}
{{- 'assistant: ' if add_generation_prompt else '' }}
"""

#: Without an end of a turn: the next header ends it, as in GLM.
ENDLESS = r"""
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
    {{- '<|observation|>' if message.role == 'tool' else '<|' + message.role + '|>' }}
    {%- if message.role == 'assistant' %}[[
        {{- '\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + value + '</arg_value>' }}
            {%- endfor %}
            {{- '\n</tool_call>' }}
        {%- endfor %}]]
    {%- else %}
        {{- '\n' + message.content }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt else '' }}
"""

#: Name -> (template, its special tokens, other added tokens).
TEMPLATES: dict[str, tuple[str, list[str], list[str]]] = {
    "qwen3": (
        QWEN3,
        ["<|im_start|>", "<|im_end|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"],
    ),
    "llama3": (
        LLAMA3,
        ["<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"],
        [],
    ),
    "mistral": (
        MISTRAL,
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        [],
    ),
    "deepseek": (
        DEEPSEEK,
        ["<s>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>"],
        [
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁outputs▁end｜>",
            "<think>",
        ],
    ),
    "plain": (PLAIN, [], []),
    "endless": (
        ENDLESS,
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        ["<tool_call>", "</tool_call>", "<arg_key>"],
    ),
}


def written(name: str, *, blocks: bool) -> str:
    """A template by its name, with generation blocks or without."""
    tags = ("{%- generation %}", "{%- endgeneration %}") if blocks else ("", "")
    return TEMPLATES[name][0].replace("[[", tags[0]).replace("]]", tags[1]).strip()
