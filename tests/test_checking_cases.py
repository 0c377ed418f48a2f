"""Laws of the covering set."""

import itertools

from inference_engine.checking.cases import Case, Factors, all_cases, covering_cases

SMALL = Factors(weights=("float32",), batch=(1, 3), prompt_tokens=(5,))


def _pairs(cases: list[Case]) -> set:
    rows = [list(case.to_json().items()) for case in cases]
    return {pair for row in rows for pair in itertools.combinations(row, 2)}


def test_covering_set_holds_every_pair_of_values() -> None:
    for factors in (Factors(), SMALL):
        assert _pairs(covering_cases(factors)) == _pairs(list(all_cases(factors)))


def test_covering_set_is_small_and_has_no_case_twice() -> None:
    cases = covering_cases(Factors())
    assert len(set(cases)) == len(cases) <= 40


def test_exact_dtypes_cover_every_pair_among_themselves() -> None:
    exact = Factors(activation_dtype=("float32",), reduce_dtype=("float32",))
    found = [
        c for c in covering_cases(Factors()) if (c.activation_dtype, c.reduce_dtype) == ("float32", "float32")
    ]
    assert _pairs(found) >= _pairs(list(all_cases(exact)))


def test_all_cases_are_the_whole_product() -> None:
    assert len(list(all_cases(SMALL))) == 2 * 4 * 4 * 1 * 2 * 2 * 2 * 1


def test_covering_set_is_always_the_same() -> None:
    assert covering_cases(Factors()) == covering_cases(Factors())
