# SPDX-License-Identifier: Apache-2.0
"""What no model can take is refused at entry, by name; what a model can take is not."""

import math
import unittest
from types import SimpleNamespace

from sglang.srt.managers import input_limits
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

VOCAB, HIDDEN = 512, 8


def manager(**fields):
    """A real tokenizer manager of a text model, with what entry reads of it."""
    made = TokenizerManager.__new__(TokenizerManager)
    made.model_config = SimpleNamespace(vocab_size=VOCAB, hidden_size=HIDDEN)
    made.mm_processor = made.tokenizer = made.preferred_sampling_params = None
    made.sampling_params_class = SamplingParams
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def request(**fields):
    """One prompt, normalized by the release's own code."""
    made = GenerateReqInput(**{"input_ids": [5, 6, 7], **fields})
    made.normalize_batch_and_arguments()
    return made


class TestPrompt(unittest.TestCase):
    def refused(self, words, prompt, **fields):
        with self.assertRaisesRegex(ValueError, words):
            manager()._validate_one_request(request(**fields), prompt)

    def test_a_token_outside_the_vocabulary_is_refused_by_number(self):
        for token in (-1, -(2**31), VOCAB, 600, 2**31, 2**62):
            for prompt in ([token], [5, 6, token], [token, 7]):
                self.refused(rf"token {token}, the model's tokens are \[0, 512\)", prompt)

    def test_the_vocabulary_to_its_ends_is_taken(self):
        for prompt in ([0], [VOCAB - 1], list(range(VOCAB))):
            input_limits.check_request(manager(), request(), prompt)

    def test_an_empty_prompt_is_refused(self):
        self.refused("prompt is empty", [])

    def test_a_session_may_bring_the_whole_prompt(self):
        session = request(session_params={"id": "s"})
        input_limits.check_request(manager(), session, [])

    def test_an_embedding_request_is_held_to_the_same(self):
        asked = EmbeddingReqInput(input_ids=[5, 600])
        asked.normalize_batch_and_arguments()
        with self.assertRaisesRegex(ValueError, "token 600"):
            manager()._validate_one_request(asked, [5, 600])

    def test_placeholders_of_a_processor_and_tokens_of_an_adapter_are_taken(self):
        image = request(image_data=["picture"])
        input_limits.check_request(manager(mm_processor=object()), image, [-200, 600])
        input_limits.check_request(manager(), request(lora_path="adapter"), [5, 600])

    def test_an_image_for_a_text_model_opens_no_way_around(self):
        self.refused("token 600", [5, 600], image_data=["picture"])

    def test_embeddings_have_the_models_width(self):
        right, wrong = [[0.5] * HIDDEN] * 3, [[0.5] * HIDDEN, [0.5] * 2]
        asked = GenerateReqInput(input_embeds=right)
        asked.normalize_batch_and_arguments()
        input_limits.check_request(manager(), asked, None)
        asked.input_embeds = wrong
        with self.assertRaisesRegex(ValueError, "row of 2 numbers, the model's have 8"):
            manager()._validate_one_request(asked, None)


class TestLogprobs(unittest.TestCase):
    def refused(self, words, **fields):
        with self.assertRaisesRegex(ValueError, words):
            manager()._validate_one_request(request(**fields), [5])

    def test_no_more_top_logprobs_than_tokens(self):
        for count in (-5, VOCAB + 1, 10**9, 2**40):
            self.refused(
                rf"top_logprobs_num must be in \[0, 512\], got {count}", top_logprobs_num=count
            )
        for count in (0, 1, VOCAB):
            input_limits.check_request(manager(), request(top_logprobs_num=count), [5])

    def test_a_logprob_is_of_a_token_of_the_vocabulary(self):
        for tokens in ([VOCAB], [5, -1], ["a"], [[5]]):
            asked = request()
            asked.token_ids_logprob = tokens
            with self.assertRaisesRegex(ValueError, "token_ids_logprob must be"):
                manager()._validate_one_request(asked, [5])

    def test_what_only_the_process_can_give_is_refused(self):
        asked = request()
        asked.positional_embed_overrides = {"positions": [1]}
        with self.assertRaisesRegex(ValueError, "positional_embed_overrides"):
            manager()._validate_one_request(asked, [5])


class TestSampling(unittest.TestCase):
    def refused(self, words, **params):
        with self.assertRaisesRegex(ValueError, words):
            SamplingParams(**params).verify(VOCAB)

    def test_whole_numbers_fit_the_tensors_they_go_to(self):
        for value in (2**31, 2**40, 2**70):
            self.refused(f"top_k must be in .* got {value}", top_k=value)
            self.refused(
                f"min_new_tokens must be in .* got {value}",
                min_new_tokens=value,
                max_new_tokens=None,
            )
        self.refused("sampling_seed must be", sampling_seed=2**63)
        for value in (1.5, True, "5"):
            self.refused("max_new_tokens must be a whole number", max_new_tokens=value)

    def test_numbers_are_finite(self):
        for name in input_limits.FINITE:
            self.refused(f"{name} must be a", **{name: math.inf})
            self.refused(f"{name} must be a", **{name: math.nan})
        self.refused("logit_bias must be finite", logit_bias={"5": math.inf})

    def test_tokens_masked_by_index_are_in_the_vocabulary(self):
        for token in (-5, VOCAB, 999999):
            self.refused(
                f"stop_token_ids must be .* got {token}", min_new_tokens=2, stop_token_ids=[token]
            )
            SamplingParams(stop_token_ids=[token]).verify(VOCAB)

    def test_ordinary_parameters_are_taken(self):
        for params in (
            {},
            {"temperature": 0},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1},
            {"top_k": -1},
            {"max_new_tokens": None},
            {"min_new_tokens": 2, "stop_token_ids": [0, VOCAB - 1]},
            {"logit_bias": {"5": -100.0}},
            {"sampling_seed": 2**63 - 1},
        ):
            SamplingParams(**params).verify(VOCAB)


class TestShape(unittest.TestCase):
    def refused(self, words, **fields):
        with self.assertRaisesRegex(ValueError, words):
            request(**fields)

    def test_a_list_has_an_entry_for_each_prompt(self):
        for name, value in (
            ("return_logprob", [True]),
            ("top_logprobs_num", [1]),
            ("bootstrap_room", [3]),
            ("sampling_params", [{}]),
        ):
            self.refused(
                f"{name} has 1 entries for 2 prompts", input_ids=[[5, 6], [7]], **{name: value}
            )

    def test_one_prompt_takes_no_lists(self):
        for name, value in (
            ("rid", ["a"]),
            ("sampling_params", [{}]),
            ("bootstrap_room", [3]),
            ("return_hidden_states", []),
        ):
            self.refused(f"{name} is a list", **{name: value})

    def test_the_number_of_answers_is_a_number_in_bounds(self):
        for value in (0, -1, None, True, "2", 1.5, input_limits.MAX_SAMPLES + 1):
            self.refused("n must be", sampling_params={"n": value})

    def test_an_empty_id_is_refused(self):  # an abort by prefix would reach every request
        self.refused("rid is empty", rid="")

    def test_what_cannot_be_read_is_refused_by_name(self):
        self.refused("cannot be read", input_ids=None, input_embeds=[])
        self.refused("cannot be read", input_ids=[[5]], sampling_params=[])

    def test_an_unreadable_pattern_is_refused(self):
        asked = request(sampling_params={"stop_regex": "("})
        with self.assertRaisesRegex(ValueError, "cannot be read"):
            manager()._create_tokenized_object(asked, "", [5])

    def test_usual_batches_are_taken(self):
        batch = request(
            input_ids=[[5, 6], [7]],
            sampling_params={"n": 2},
            bootstrap_host=["h", "h"],
            bootstrap_port=[1, 1],
            bootstrap_room=[11, 12],
        )
        self.assertEqual(batch.batch_size, 2)
        self.assertEqual(batch.parallel_sample_num, 2)
        samples = request(sampling_params={"n": 3}, bootstrap_room=[11, 12, 13])
        self.assertEqual(samples.batch_size, 1)


if __name__ == "__main__":
    unittest.main()
