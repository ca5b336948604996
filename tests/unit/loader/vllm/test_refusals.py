"""Words as vLLM 0.32 and transformers 5 have them, and what users are told instead."""

import json
import logging
from pathlib import Path

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from preloadd.domain.settings import ModelSettings, RankSettings, Source, Versions
from preloadd.loader.vllm.refusals import plain, quiet, told

CODE = (
    "The repository /m contains custom code which must be executed to correctly load the model. "
    "You can inspect the repository content at /m .\nPlease pass the argument "
    "`trust_remote_code=True` to allow custom code to be run."
)
UNKNOWN = (
    "The checkpoint you are trying to load has model type `wombat` but Transformers does not "
    "recognize this architecture. This could be because of an issue with the checkpoint.\n\n"
    "You can update Transformers with the command `pip install --upgrade transformers`."
)
NO_MODEL = (
    "Model architectures ['WombatForCausalLM'] are not supported for now. Supported architectures: "
    f"dict_keys({['AfmoeForCausalLM'] * 200})"
)
NO_TYPE = "Unrecognized model in /m. Should have a `model_type` key in its config.json."
WOMBAT = {"model_type": "wombat", "architectures": ["WombatForCausalLM"]}


class Config(BaseModel):
    """Refuses as vLLM's configurations do."""

    share: float = Field(default=0.9, le=1)
    text: str = ""

    @model_validator(mode="after")
    def _refuse(self):
        if self.text:
            raise ValueError(self.text)
        return self


def refused(**given) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        Config(**given)
    return caught.value


@pytest.fixture
def settings(tmp_path):
    """Settings of a rank whose model has this configuration, and perhaps a partner."""

    def made(config, partner=None):
        sources = []
        for number, content in enumerate(filter(None, (config, partner))):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(content))
            sources.append(Source(str(folder), f"org/{number}"))
        model = ModelSettings(sources[0].path, sources[0].name, partner=[*sources, None][1])
        versions = Versions(vllm="0.32.0", transformers="5.24.0")
        return RankSettings("g", "CPU-0", "/run/x", derived=False, model=model, versions=versions)

    return made


@pytest.mark.parametrize("words", [CODE, UNKNOWN, NO_MODEL])
def test_a_model_with_code_of_its_own_is_told_the_flag_that_trusts_it(settings, words):
    wanted = settings(WOMBAT | {"auto_map": {"AutoConfig": "x.Y"}})
    why = told(refused(text=words), wanted, trusted=False)
    assert why == (
        "org/0 comes with code of its own (auto_map in its config.json), which vLLM runs only if "
        "it is trusted: read that code, then give --trust-remote-code, here and to the engines"
    )


@pytest.mark.parametrize(
    ("words", "config", "kind"),
    [
        (UNKNOWN, WOMBAT, "model_type 'wombat', architectures ['WombatForCausalLM']"),
        (NO_MODEL, WOMBAT, "model_type 'wombat', architectures ['WombatForCausalLM']"),
        (NO_TYPE, {"vocab_size": 1}, "no model_type"),
    ],
)
def test_a_model_that_nobody_knows_is_told_with_its_kind_and_who_does_not_know_it(
    settings, words, config, kind
):
    why = told(refused(text=words), settings(config), trusted=True)
    assert why.startswith("org/0 is of a kind that vLLM 0.32.0 and transformers 5.24.0 do not ")
    assert f"({kind} in its config.json)" in why
    assert "--python" in why
    assert "--trust-remote-code" in why
    assert "\n" not in why


def test_the_model_that_is_meant_is_told_not_the_one_beside_it(settings):
    wanted = settings({"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}}, WOMBAT)
    assert told(refused(text=UNKNOWN), wanted, trusted=False).startswith("org/1 is of a kind")
    assert told(ValueError(CODE), wanted, trusted=False).startswith("org/0 comes with code")


def test_other_refusals_are_the_first_line_of_vllms_words(settings):
    wanted = settings(WOMBAT)
    words = refused(text="No such folder: '/x'.\nPlease verify:\n1. this\n2. that")
    before = "vLLM refuses the model or its arguments"
    assert told(words, wanted, trusted=False) == f"{before}: No such folder: '/x'."
    words = refused(share=7)
    assert told(words, wanted, trusted=False) == (
        f"{before}: share: Input should be less than or equal to 1 (given: 7)"
    )
    assert told(AssertionError(), wanted, trusted=False) == f"{before}: AssertionError"


def test_a_configuration_that_cannot_be_read_is_no_further_fault(settings):
    wanted = settings(WOMBAT)
    Path(wanted.model.path, "config.json").write_text("[")
    assert "(no model_type in its config.json)" in told(ValueError(NO_TYPE), wanted, trusted=False)


def test_words_of_the_parser_are_one_line_of_no_great_length():
    assert plain(f"argument --x: {refused(share=7)}") == (
        "argument --x: share Input should be less than or equal to 1"
    )
    assert plain("a\n  b\n") == "a b"
    assert len(plain("x" * 9999)) < 1000


def test_what_is_raised_anyway_is_not_told_unless_somebody_debugs(caplog):
    talker = logging.getLogger("vllm.transformers_utils.repo_utils")
    with quiet(unless=False):
        # As vLLM does when it makes a configuration.
        talker.setLevel(logging.NOTSET)
        talker.error("at length")
    with quiet(unless=True):
        talker.error("for those who debug")
    talker.error("later")
    assert caplog.messages == ["for those who debug", "later"]
