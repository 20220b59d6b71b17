"""Options of the data source: what is taken, what is refused and with which words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from keyfold.checkpoints.restore.view_token import ViewToken
from keyfold.statestore.errors import ConfigError
from keyfold.streaming.options import Offsets, Options, parse


def parsed(**options: str) -> Options:
    return parse({"path": "var/counts", **options})


def refused(**options: str) -> ConfigError:
    with pytest.raises(ConfigError) as e:
        parsed(**options)
    return e.value


def test_without_a_mode_it_is_the_state() -> None:
    assert parsed().mode == "state"
    assert parsed(at="3").mode == "state"


@pytest.mark.parametrize(
    "name", ["startingOffsets", "endingOffsets", "failOnDataLoss", "maxOffsetsPerTrigger"]
)
def test_an_option_about_following_makes_the_mode_changes(name: str) -> None:
    value = {"failOnDataLoss": "true", "maxOffsetsPerTrigger": "5"}.get(name, "latest")
    assert parsed(**{name: value}).mode == "changes"
    assert parsed(**{name: value, "mode": "log"}).mode == "log"


def test_names_and_words_are_compared_without_case() -> None:
    options = parsed(MODE="Log", STARTINGOFFSETS=" Latest", includeheaders="TRUE", FAILONDATALOSS="False")
    assert (options.mode, options.starting, options.include_headers) == ("log", "latest", True)
    assert not options.fail_on_data_loss


def test_an_unknown_name_is_refused_with_the_nearest_valid_one() -> None:
    error = refused(stratingoffsets="earliest")
    assert (error.expected, error.found) == ("startingOffsets", "stratingoffsets")


def test_a_name_that_resembles_nothing_is_refused_with_all_valid_ones() -> None:
    assert "maxOffsetsPerTrigger" in str(refused(zzz="1").expected)


def test_an_unknown_mode_is_refused_with_the_nearest_valid_one() -> None:
    assert refused(mode="change").expected == "changes"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"mode": "log", "at": "1"}, "at"),
        ({"mode": "state", "startingOffsets": "latest"}, "startingOffsets"),
        ({"mode": "changes", "includeHeaders": "true"}, "includeHeaders"),
        ({"includeHeaders": "true"}, "includeHeaders"),
        ({"mode": "log", "endOffsets": "1"}, "endOffsets"),
        ({"at": "1", "endOffsets": "1"}, "endOffsets"),
        ({"at": " "}, "at"),
        ({"endOffsets": "1,x"}, "endOffsets"),
        ({"partitions": ""}, "partitions"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger"),
        ({"maxOffsetsPerTrigger": "-1"}, "maxOffsetsPerTrigger"),
        ({"viewTimeoutMs": "soon"}, "viewTimeoutMs"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss"),
        ({"endingOffsets": "earliest"}, "endingOffsets"),
        ({"startingOffsets": "5"}, "startingOffsets"),
        ({"startingOffsets": "earlyest"}, "startingOffsets"),
        ({"startingOffsets": '{"keyfold": "u"}'}, "startingOffsets"),
        ({"startingOffsets": '{"keyfold": "u", "offsets": {"0": "1"}}'}, "startingOffsets"),
        ({"startingOffsets": '{"keyfold": "u", "offsets": {"0": -1}}'}, "startingOffsets"),
        ({"startingOffsets": '{"keyfold": "u", "offsets": {"0": true}}'}, "startingOffsets"),
        ({"startingOffsets": '{"keyfold": "u", "offsets": {"a": 1}}'}, "startingOffsets"),
        ({"startingOffsets": '{"counts": {"0": 1}}'}, "startingOffsets"),
        ({"startingOffsets": '{"keyfold": "u", "seed": 4}'}, "startingOffsets"),
        ({"paths": '["a","b"]'}, "path"),
        ({"path": ""}, "path"),
        ({"path": "s3a://bucket/counts"}, "path"),
    ],
)
def test_a_bad_value_is_refused_by_its_option_s_name(options: dict[str, str], name: str) -> None:
    error = refused(**options)
    assert f"'{name}'" in error.what
    assert error.expected is not None
    assert error.remedy is not None


def test_the_path_is_made_absolute_where_it_is_given() -> None:
    assert parsed().path == Path(os.path.abspath("var/counts"))
    assert parsed(path="file:///var/some%20counts").path == Path("/var/some counts")


def test_at_is_a_commit_number_or_else_an_anchor_s_name() -> None:
    assert parsed(at="17").at == 17
    assert parsed(at="before-migration").at == "before-migration"


def test_offsets_are_read_back_as_they_were_written() -> None:
    offsets = Offsets("u", {1: 40, 0: 12, 10: 3}, {1: 17})
    written = json.dumps(offsets.to_json())
    assert written == ('{"keyfold": "u", "offsets": {"0": 12, "1": 40, "10": 3}, "snapshot": {"1": 17}}')
    assert parsed(startingOffsets=written).starting == offsets


def test_offsets_without_marks_have_the_documented_form() -> None:
    assert Offsets("u", {0: 12}, {}).to_json() == {"keyfold": "u", "offsets": {"0": 12}}


@pytest.mark.parametrize(
    "options",
    [{"maxOffsetsPerTrigger": "5"}],
)
def test_options_for_streams_are_refused_in_a_batch(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="not for a batch"):
        parsed(**options).check_kind("batch")


@pytest.mark.parametrize(
    "options", [{"endingOffsets": "latest"}, {"partitions": "0", "mode": "log"}, {"endOffsets": "3"}]
)
def test_options_for_batches_are_refused_in_a_stream(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="not for a stream"):
        parsed(**options).check_kind("stream")


def test_a_stream_with_no_options_is_told_how_to_follow() -> None:
    with pytest.raises(ConfigError, match=r"startingOffsets.*earliest"):
        parsed().check_kind("stream")


def test_a_seed_needs_a_commit_that_never_changes() -> None:
    parsed(at="4").check_kind("stream")
    with pytest.raises(ConfigError, match="commit number"):
        parsed(at="an-anchor").check_kind("stream")


def test_a_view_is_taken_with_the_offsets_it_is_of_and_as_it_was_written() -> None:
    view = ViewToken("uuid", 7, "lease", 90, 60, (0, 1), (0, 5), (0, 2), {1: ()})
    options = parsed(endOffsets="3,9", view=view.to_text())
    assert options.view == view
    assert refused(view=view.to_text()).expected == "both"
    for text in ("x", "e30=", view.to_text()[:-8], ""):
        assert "'view'" in str(refused(endOffsets="3,9", view=text))


def test_where_a_query_began_is_part_of_a_position() -> None:
    position = Offsets("feed", {0: 4}, {}, {}, {0: 2})
    assert position.to_json()["begun"] == {"0": 2}
    assert Offsets.from_json(position.to_json()) == position
    with pytest.raises(ValueError, match="begun"):
        Offsets.from_json({"keyfold": "feed", "offsets": {"0": 4}, "begun": [2]})
