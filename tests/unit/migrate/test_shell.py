"""Words of a shell script: quotes, variables, arrays, sums. Nothing is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.migrate.shell import commands
from anygauge.migrate.table import Unresolved


def last(text: str) -> list[object]:
    return list(list(commands(text))[-1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run --a 1 # why\n", ["run", "--a", "1"]),
        ("run --a \\\n  'b c' \"d e\"f#g", ["run", "--a", "b c", "d ef#g"]),
        ("A=1\nB=${A}2\nrun $B ${C:-$A} ${D:-x}", ["run", "12", "1", "x"]),
        ('A="1 2"\nrun $A "$A" \'$A\'', ["run", "1", "2", "1 2", "$A"]),
        (
            'X=(\n --a 1 # --b 2\n #--c 3\n)\nX+=(--d)\nrun ${X[@]} "${X[@]}"',
            ["run", *["--a", "1", "--d"] * 2],
        ),
        ("N=4\nrun $((N * 2)) $(( (N + 1) * ${N} )) $((7 / 2))", ["run", "8", "20", "3"]),
        ("export A=1; run $A && x $A", ["x", "1"]),
        ('run ["console","wandb"]', ["run", "[console,wandb]"]),
        ("A=1\nA=2\nrun $A", ["run", "2"]),
        ('A="--a 1"\nA+=" --b 2"\nNEW+=3\nrun $A $NEW', ["run", "--a", "1", "--b", "2", "3"]),
        ("if x; then run --a 1; fi", ["run", "--a", "1"]),
        ("run $(seq 16 8 32) $( seq 3 )\\\n $(seq 2 -1 1);", ["run", "16", "24", "32", *"123", *"21"]),
        ("A=($(seq 1 2))\nrun ${A[@]} '$(seq 3)'", ["run", "1", "2", "$(seq 3)"]),
        ("python - <<EOF\nif x:\n  y()\nEOF\nN=1\nrun $N", ["run", "1"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert last(text) == words


@pytest.mark.parametrize(
    "word", ["$(touch x)", "`touch x`", "$UNSET/a", "${UNSET}", "$((1/0))", "$((f(1)))", "$1"]
)
def test_a_word_that_only_a_run_knows_is_unresolved(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(last(f"run {word}")[1], Unresolved)
    assert isinstance(last(f'A={word}\nrun "$A"')[1], Unresolved)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", ["3 1", "1 0 3", "4097", "1 999999999", "1 2 3 4", "a", "1.5", "-w 1 3", "1 $N"]
)
def test_numbers_that_are_none_or_too_many_are_unresolved(arguments: str) -> None:
    unresolved = Unresolved("$(...)")
    assert last(f"run $(seq {arguments})") == ["run", unresolved]
    assert last('run "$(seq 3)" $(seq 3)x') == ["run", unresolved, Unresolved("$(...)x")]


@pytest.mark.parametrize(
    "value", ["`a b`", '"`a b`"', "$(a b)", '"$(a $(b c) d)"', "$(( 1 / 0 ))", '"${B:-1 2}"']
)
def test_an_unknown_value_of_a_variable_is_one_word(value: str) -> None:
    assert last(f"if x; then B=3; fi\nA={value}\nrun $A") == ["run", Unresolved("$A")]


@pytest.mark.parametrize("separator", ["; ", "\n"])
@pytest.mark.parametrize(
    "parts",
    [
        ("if x", "then N=16", "else N=32", "fi"),
        ("if x", "then if y", "then M=1", "fi", "N+=1", "fi"),
        ("for N in 1 2", "do run", "done"),
        ("while x", "do export N=3", "done"),
        ("case $1 in a) N=1 ;", " b) M=2 ;", " esac"),
    ],
)
def test_a_variable_of_a_branch_or_loop_is_unresolved(parts: tuple[str, ...], separator: str) -> None:
    text = f"N=8{separator}{separator.join(parts)}{separator}"
    assert last(f"{text}run $N ${{N:-4}}") == ["run", Unresolved("$N"), Unresolved("${N:-4}")]
    assert last(f"{text}N=9; run $N") == ["run", "9"], "it counts again after the branch"


def test_an_array_keeps_what_is_assigned_outside_of_a_branch() -> None:
    text = "A=(--a 1)\nif x; then A+=(--b 2); fi\nA+=(--c 3)\nrun ${A[@]}"
    assert last(text) == ["run", "--a", "1", Unresolved("${A[@]}"), "--c", "3"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('A="--a 1"\nif x; then A+=" --b 2"; fi\nA+=" --c 3"', ["--a", "1", Unresolved("$A"), "--c", "3"]),
        ('A="--a 1"\nif x; then A+=2; fi', ["--a", Unresolved("1$A")]),
        ('A="--a $1 --c 3"', ["--a", Unresolved("$1"), "--c", "3"]),
        ("A=$1", [Unresolved("$A")]),
        ("", [Unresolved("$A")]),
    ],
)
def test_a_variable_that_is_known_in_part_keeps_its_words(text: str, words: list[object]) -> None:
    assert last(f"{text}\nrun $A") == ["run", *words]
    assert last(f'{text}\nrun "$A"') == ["run", Unresolved("$A")]


def test_the_home_directory_alone_is_taken_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SECRET", "s")
    assert last("run $HOME/data $SECRET") == ["run", "/home/me/data", Unresolved("$SECRET")]


def test_expansions_that_multiply_are_refused() -> None:
    doubled = "A=aaaaaaaaaa\n" + "A=$A$A\n" * 60
    with pytest.raises(ValueError, match="more than 65536 characters"):
        list(commands(doubled))
    with pytest.raises(ValueError, match="more than 65536 characters"):
        list(commands(f"A={'a' * 40_000}\nB=$A\nB+=$A"))
    arrays = "A=(a b c d)\n" + "A=(${A[@]} ${A[@]})\n" * 60
    with pytest.raises(ValueError, match="more than 20000 words"):
        list(commands(arrays))
    numbers = "$(seq 4096)"
    for text in (f"{numbers} " * 20_000, f"A=({numbers})\n" * 17_000, f"A+=({numbers})\n" * 6):
        with pytest.raises(ValueError, match="more than 20000 words"):
            list(commands(text))


@pytest.mark.parametrize("part", ["$((", '"\\', "'", "${", "$(", "a=(", "((", "${A:-", "# ", "$"])
def test_any_text_is_read_to_its_end(part: str) -> None:
    text = part * (60_000 // len(part))  # minutes, if each part were read to the end
    assert sum(map(len, commands(text))) <= 1


def test_many_words_are_too_many() -> None:
    with pytest.raises(ValueError, match="more than 20000 words"):
        list(commands("a " * 50_000))
