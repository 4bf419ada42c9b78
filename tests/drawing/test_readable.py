from meshbook.drawing.svg import readable


def test_numbers_are_read_with_commas_and_no_more_digits_than_matter():
    assert [readable(value) for value in (1892.4, 100, 99.96, 34, 6.0, 0.2084, 0)] == [
        "1,892", "100", "100", "34", "6", "0.208", "0"]
    assert readable(-1234.5) == "-1,234"
