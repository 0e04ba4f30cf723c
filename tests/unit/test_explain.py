"""``kvcomm explain``: what is read, what is forecast, and what a user gets to see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvcomm_integrations import cli
from kvcomm_integrations.config import ReuseConfig
from kvcomm_integrations.errors import ConfigurationError
from kvcomm_integrations.prompts.chat_message import ChatMessage
from kvcomm_integrations.prompts.tokenizer import ChatTokenizer
from kvcomm_integrations.report.chat_file import Chat, read_chat, read_report
from kvcomm_integrations.report.explain import Explanation, Forecast, beside, show
from kvcomm_integrations.wire import TREATMENTS, EdgeReport, RequestReport, SegmentKind, SegmentReport

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = (
    "How does the river Seine reach the sea, which towns does it pass on its way there, and how long is the water "
    "under way before it meets the tide? Answer in detail, and name your sources."
)
ANSWER = (
    "It rises near Dijon, passes Troyes, Paris and Rouen, and meets the English Channel at Le Havre, 775 kilometres on."
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of one token per byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    folder = tmp_path_factory.mktemp("model")
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE)
    hf.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer.from_pretrained(model)


@pytest.fixture
def write(tmp_path: Path):
    def put(name: str, data: Any) -> Path:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return path

    return put


def chat(agent: str, *others: ChatMessage, answer: str | None = None, system: str | None = None) -> Chat:
    system = system or f"You are the {agent} of a team."
    return Chat(agent, (ChatMessage("system", system), ChatMessage("user", QUESTION), *others), answer=answer)


def parts(explanation: Explanation) -> dict[str, SegmentReport]:
    return {part.name: part for part in explanation.report.segments if part.kind is SegmentKind.PLACEHOLDER}


def adds_up(explanation: Explanation) -> bool:
    report = explanation.report
    total = sum(getattr(report, treatment) for treatment in TREATMENTS)
    sizes = [sum(getattr(part, treatment) for treatment in TREATMENTS) for part in report.segments]
    return total == report.prompt_tokens and sizes == [part.end - part.start for part in report.segments]


# --- reading ---------------------------------------------------------------------------------------------------------


def test_forms_of_messages(write) -> None:
    openai = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "result", "tool_call_id": "1"},
    ]
    read = read_chat(write("critic.json", openai))
    assert read.agent == "critic" and [message.content for message in read.messages] == ["s", "one two", "", "result"]
    assert read.messages[2].tool_calls[0]["function"]["name"] == "f" and read.messages[3].tool_call_id == "1"


def test_langchain_dumps(write) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, messages_to_dict

    call = {"name": "f", "args": {"x": 1}, "id": "1"}
    messages = [
        SystemMessage("s"),
        HumanMessage("q"),
        AIMessage("", tool_calls=[call], name="solver"),
        ToolMessage("r", tool_call_id="1"),
    ]
    for dumped in (messages_to_dict(messages), [message.model_dump(mode="json") for message in messages]):
        read = read_chat(write("a.json", {"messages": dumped, "agent": "b", "answer": "yes"}))
        assert [message.role for message in read.messages] == ["system", "user", "assistant", "tool"]
        assert read.messages[2].name == "solver"
        assert read.messages[2].tool_calls[0]["function"] == {"name": "f", "arguments": {"x": 1}}
        assert (read.agent, read.answer) == ("b", "yes")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ('[\n {"role": "user",\n  content: 1}]', "not valid JSON at line 3, column 3"),
        ("[]", "messages: List should have at least 1 item"),
        ('"text"', "holds no messages"),
        ('{"agent": "a"}', "messages: Field required"),
        ('[{"content": "x"}]', "messages.0.role"),
        ('[{"role": "wizard", "content": "x"}]', "'wizard' is unknown; use system, user, assistant or tool"),
        ('[{"role": "user", "content": [3]}]', "content block 3"),
        ('[{"role": "assistant", "tool_calls": [{"function": "f"}]}]', "has no name"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_bad_files(write, data, complaint) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_chat(write("bad.json", data))
    assert "bad.json" in str(caught.value) and complaint in str(caught.value)


def test_reports_are_found_where_they_are(write) -> None:
    report = RequestReport(agent="a", prompt_tokens=3, segments=(SegmentReport(kind="fixed", start=0, end=3),))
    dumped = report.model_dump(mode="json")
    for data in (dumped, {"kvcomm": dumped}, {"response_metadata": {"kvcomm": {"report": dumped}}, "content": "x"}):
        assert read_report(write("report.json", data)) == report
    for data in ({}, [], {"segments": 3}):
        with pytest.raises(ConfigurationError, match="holds no report"):
            read_report(write("report.json", data))


# --- forecasting -----------------------------------------------------------------------------------------------------


def test_first_prompt_is_computed(tokenizer) -> None:
    first = Forecast(tokenizer).next(chat("planner"))
    assert first.report.computed == first.report.prompt_tokens and adds_up(first)
    assert parts(first)["user_question"].reason == "not seen before"


def test_other_agents_contents_are_loaded(tokenizer) -> None:
    forecast = Forecast(tokenizer)
    forecast.next(chat("planner", answer=ANSWER))
    then = forecast.next(chat("critic", ChatMessage("user", f"The planner says:\n{ANSWER}")))
    question, answer = parts(then)["user_question"], parts(then)["agent:planner:response"]
    assert (question.repaired, question.source) == (32, "planner")
    assert question.loaded == len(QUESTION) - 32 and answer.loaded == len(ANSWER) - 32
    assert adds_up(then)


def test_same_prompt_comes_from_the_prefix_cache(tokenizer) -> None:
    forecast = Forecast(tokenizer, block_size=16)
    first = forecast.next(chat("planner"))
    again = forecast.next(chat("planner"))
    assert again.report.exact == (first.report.prompt_tokens - 1) // 16 * 16
    assert adds_up(again)


def test_estimates_do_not_enter_the_prefix_cache(tokenizer) -> None:
    forecast = Forecast(tokenizer, block_size=16)
    forecast.next(chat("planner"))
    loaded = forecast.next(chat("critic"))
    again = forecast.next(chat("critic"))
    assert loaded.report.loaded > 0
    question = parts(again)["user_question"]
    assert again.report.segments[0].exact == again.report.segments[0].end and question.loaded > 0


def test_part_of_an_answer_is_found(tokenizer) -> None:
    forecast = Forecast(tokenizer)
    forecast.next(chat("planner", answer=f"\n\n{ANSWER}\n"))
    then = forecast.next(chat("critic", ChatMessage("user", ANSWER, name="planner")))
    assert parts(then)["agent:planner:response"].loaded > 0


def test_what_is_left_out_says_so(tokenizer) -> None:
    forecast = Forecast(tokenizer)
    forecast.next(chat("planner"))
    then = forecast.next(chat("critic", system="You are the critic of a team. " * 30))
    assert then.report.loaded == 0 and then.report.reason == "too much would have to be repaired"
    assert "too much around it" in parts(then)["user_question"].reason


def test_a_history_behind_another_system_prompt_is_one_run(tokenizer) -> None:
    forecast = Forecast(tokenizer)
    forecast.next(chat("planner", answer=ANSWER))
    then = forecast.next(chat("critic", ChatMessage("assistant", ANSWER, name="planner")))
    question, between, answer = then.report.segments[1:4]
    assert question.repaired == 32 and between.loaded == between.end - between.start
    assert (answer.repaired, answer.source) == (0, "planner")
    assert "earlier prompt" in between.reason
    apart = Forecast(tokenizer, config=ReuseConfig(join_runs=False))
    apart.next(chat("planner", answer=ANSWER))
    then = apart.next(chat("critic", ChatMessage("assistant", ANSWER, name="planner")))
    assert then.report.segments[2].loaded == 0 and then.report.segments[3].repaired == 32


def test_edited_text_is_new(tokenizer) -> None:
    forecast = Forecast(tokenizer)
    forecast.next(chat("planner", answer=ANSWER))
    then = forecast.next(chat("critic", ChatMessage("user", ANSWER.replace("775", "777"), name="planner")))
    assert parts(then)["agent:planner:response"].reason == "not seen before"


# --- showing ---------------------------------------------------------------------------------------------------------


def printed(explanation: Explanation, tokenizer: ChatTokenizer | None, **options: Any) -> str:
    console = Console(width=4000, record=True, file=open("/dev/null", "w"), **options)  # noqa: SIM115
    show(explanation, console, tokenizer)
    return console.export_text(styles="force_terminal" in options)


def test_all_of_the_text_is_shown(tokenizer) -> None:
    forecast = Forecast(tokenizer)
    forecast.next(chat("planner", answer=ANSWER))
    then = forecast.next(chat("critic", ChatMessage("user", f"The planner says:\n{ANSWER} 🎉 [bold]not markup[/bold]")))
    text = printed(then, tokenizer)
    assert QUESTION in text and ANSWER in text and "🎉 [bold]not markup[/bold]" in text
    assert f"user_question · {len(QUESTION)} tokens · {len(QUESTION) - 32} loaded from planner, 32 repaired" in text
    assert "Prompt of critic: " in text and "fixed text" in text and "computed  by vLLM's own forward pass" in text


def test_colours_tell_what_becomes_of_tokens(tokenizer) -> None:
    forecast = Forecast(tokenizer)
    forecast.next(chat("planner"))
    text = printed(forecast.next(chat("critic")), tokenizer, force_terminal=True)
    assert f"\x1b[33m{QUESTION[:32]}" in text and f"\x1b[36m{QUESTION[32:]}" in text


def test_terminal_does_not_obey_messages(tokenizer) -> None:
    text = printed(Forecast(tokenizer).next(chat("a\x1b[2J", ChatMessage("user", "\x1b[31mred\x07 \x9bm"))), tokenizer)
    assert "\x1b" not in text and "\x07" not in text and "\x9b" not in text
    assert "␛[31mred␇" in text


def test_characters_cut_by_tokens_stay_whole(tokenizer) -> None:
    forecast = Forecast(tokenizer)
    snow = "☃" * 40  # three tokens each, so that the 32nd token lies within one
    messages = (ChatMessage("system", "You are short."), ChatMessage("user", snow))
    forecast.next(Chat("a", (ChatMessage("system", "You are brief."), *messages[1:])))
    then = forecast.next(Chat("b", messages))
    assert parts(then)["user_question"].repaired == 32
    assert snow in printed(then, tokenizer)


# --- the command -----------------------------------------------------------------------------------------------------


def as_json(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def test_command(write, model, capsys) -> None:
    planner = write("planner.json", {"messages": as_json(("system", "Plan."), ("user", QUESTION)), "answer": ANSWER})
    critic = write("critic.json", as_json(("system", "Criticise."), ("user", QUESTION), ("user", ANSWER)))
    options = ["--model", str(model), "--seen", str(planner), "--agent", "judge"]
    assert cli.main(["explain", str(critic), *options]) == 0
    out = capsys.readouterr().out
    assert "Prompt of judge" in out and "agent:planner:response" in out and "loaded from planner" in out
    assert "A forecast" in out and "\x1b" not in out


def test_command_with_a_report(write, model, tokenizer, capsys) -> None:
    messages = write("critic.json", as_json(("system", "Criticise."), ("user", QUESTION)))
    report = Forecast(tokenizer).next(read_chat(messages)).report
    told = report.segments[1].model_copy(update={"loaded": 20, "computed": len(QUESTION) - 20, "source": "somebody"})
    report = report.model_copy(update={"segments": (report.segments[0], told, *report.segments[2:]), "loaded": 20})
    file = write("report.json", report.model_dump_json())
    assert cli.main(["explain", "--report", str(file)]) == 0
    alone = capsys.readouterr().out
    assert "20 loaded from somebody" in alone and QUESTION[:40] not in alone and "A forecast" not in alone
    assert cli.main(["explain", str(messages), "--model", str(model), "--report", str(file)]) == 0
    both = capsys.readouterr().out
    assert "20 loaded from somebody" in both and QUESTION[:40] in both


def test_a_report_tells_what_is_known_of_each_edge(write, tokenizer, capsys) -> None:
    report = Forecast(tokenizer).next(chat("critic")).report
    edge = EdgeReport(
        source="planner\x1b[2J", target="critic", name="user_question", reference="producer", health="deeper",
        why="3 audits: more than 0.6 nats, limit 0.5", audits=3, divergence=0.75,
        divergence_low=0.1, divergence_high=1.2,
    )  # fmt: skip
    told = report.segments[1].model_copy(update={"edge": edge, "examples": 7})
    report = report.model_copy(update={"segments": (report.segments[0], told, *report.segments[2:])})
    assert cli.main(["explain", "--report", str(write("report.json", report.model_dump_json()))]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "→ critic (producer) · 7 examples · last audit 0.75 nats · mean of 3 audits 0.1 to 1.2 · deeper:" in out
    assert "\x1b" not in out


def test_report_of_another_prompt(tokenizer) -> None:
    report = Forecast(tokenizer).next(chat("planner")).report
    with pytest.raises(ConfigurationError, match="give the same model and, with --seen"):
        beside(report, Forecast(tokenizer).next(chat("somebody else")))


def test_errors_are_one_line(write, model, tmp_path, capsys) -> None:
    bad = write("bad.json", '[\n{"role": }]')
    for arguments in ([str(bad)], [str(tmp_path / "none.json")], ["--report", str(bad)], []):
        assert cli.main(["explain", *arguments, "--model", str(model)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("kvcomm: ") and err.count("\n") == 1
    assert cli.main(["explain", str(bad), "--model", str(model)]) == 2
    assert "line 2, column 10" in capsys.readouterr().err


def test_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, kvcomm_integrations.report.explain as e; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'vllm', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
