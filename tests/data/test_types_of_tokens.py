"""Ids are as narrow as the vocabulary allows, weights of an evaluation are float32."""
import numpy as np

from meshbook.data import grammar, token_files, tokens, vocabulary

TEXTS = list(grammar.stories(0, 40))
ENCODING = vocabulary.learn(TEXTS, 400)


def test_ids_of_a_small_vocabulary_are_uint16():
    ids = token_files.encode_part(TEXTS[0], ENCODING)
    assert ids.dtype == np.uint16 and ENCODING.decode(ids.tolist()) == TEXTS[0]


def test_weights_of_an_evaluation_are_float32(tmp_path):
    tokens.write_tokens(TEXTS, ENCODING, tmp_path / "stories.tokens")
    stream = tokens.read_tokens(tmp_path / "stories.tokens", ENCODING)
    *_, last = tokens.evaluation_batches(stream, B=7, T=31)
    assert last["weight"].dtype == np.float32 and 0 < last["weight"].mean() < 1
