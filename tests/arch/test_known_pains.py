"""What has hurt users of other runtimes, and the tests that it does not happen here.

A row is a pain, and the tests that fail where it comes back.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAINS = {
    "half characters in streams, or a last one that is lost": (
        "unit/test_text.py: test_no_half_characters, test_an_unfinished_character_is_not_lost"
    ),
    "a stop string over several tokens leaks, or text withheld for it is lost": (
        "unit/test_text.py: test_chunks_do_not_matter, test_matcher_equals_its_slow_twin;"
        "unit/test_engine.py: test_stop_strings_never_leak,"
        " test_withheld_text_is_not_lost_at_length_and_cancel"
    ),
    "the beginning-of-text token comes twice": "unit/test_tokenizer.py: test_bos_comes_once",
    "text of users becomes control tokens": (
        "unit/test_chat.py: test_no_message_forges_a_special_token;"
        "unit/test_server_openai.py: test_control_tokens_of_users_stay_text"
    ),
    "a model's template runs code": (
        "unit/test_chat.py: test_escapes_are_template_errors, test_hogs_are_template_errors;"
        "unit/test_bad_requests.py: test_templates_that_try_to_escape"
    ),
    "what a template refuses is a fault of the server": (
        "unit/test_chat.py: test_the_message_of_a_template_reaches_the_user;"
        "unit/test_server_bad_requests.py: test_what_is_wrong_is_named"
    ),
    "the tokenizer of a GGUF file gives other tokens; a file's padding is applied": (
        "unit/test_checkpoint_tokenizer.py: test_real_tokenizer_equals_llama_cpp;"
        "unit/test_tokenizer.py: test_load_checks_the_golden_ids,"
        " test_padding_and_truncation_of_the_file_are_ignored"
    ),
    "a full context shifts for ever or hangs": (
        "unit/test_engine.py: test_ignore_eos_runs_to_the_context;"
        "unit/test_server_openai.py: test_the_context_ends_an_answer"
    ),
    "the head of a prompt is dropped in silence": (
        "unit/test_server_openai.py: test_a_prompt_that_is_too_long;"
        "unit/test_api.py: test_bad_prompts"
    ),
    "one request that does not fit ends all": (
        "unit/test_engine.py: test_a_request_that_cannot_be_sampled_fails_alone;"
        "unit/test_bad_requests.py: test_bad_requests_disturb_nobody"
    ),
    "threads from the host's processors in a container": (
        "unit/test_hardware.py: test_a_container_on_a_large_host,"
        " test_threads_and_the_limit_that_decided;"
        "unit/test_serve_command.py: test_one_processor"
    ),
    "threads are pinned to processors that are not allowed": (
        "unit/test_hardware.py: test_never_more_threads_than_allowed_and_never_none;"
        "unit/test_serve_command.py: test_one_processor"
    ),
    "an idle engine burns processors": "unit/test_api.py: test_idle_runtime_uses_no_cpu",
    "the slowest kind of core holds up each step": (
        "unit/test_hardware_topology.py: test_hybrid_intel, test_big_and_little_by_frequency"
    ),
    "an instruction that the processor lacks ends the program": (
        "unit/test_hardware.py: test_flags_that_fail_are_no_features;device/test_avx2_qemu.py:"
    ),
    "a missing library of CUDA means the CPU, in silence": (
        "unit/test_cuda_provider.py: test_errors_of_the_loader, test_the_driver_is_asked_first;"
        "unit/test_factory.py: test_device_needs_a_target_of_the_package"
    ),
    "two builds of ONNX Runtime overwrite each other": (
        "unit/test_doctor.py: test_two_onnxruntimes_in_one_folder,"
        " test_two_onnxruntimes_are_found_by_their_files"
    ),
    "unloading keeps the memory": (
        "unit/test_isolated.py: test_loading_again_and_again_does_not_grow"
    ),
    "running out of memory ends the program": (
        "unit/test_engine.py: test_what_memory_can_never_hold_is_refused;"
        "unit/test_hardware.py: test_a_host_short_of_memory"
    ),
    "who leaves is served on": (
        "unit/test_server_clients.py: test_who_leaves_is_forgotten_within_a_step;"
        "unit/test_api.py: test_closing_a_stream_cancels_it, test_many_threads_with_random_cancels"
    ),
    "two threads crash it; what the host prints is swallowed": (
        "unit/test_api.py: test_many_threads_with_random_cancels, test_two_runtimes_do_not_meet;"
        "unit/test_isolated.py: test_nothing_is_printed"
    ),
    "signal handlers, and errors at exit": (
        "unit/test_api.py: test_exit_without_close_is_clean,"
        " test_dropping_a_runtime_ends_its_thread"
    ),
    "a child outlives the app": (
        "unit/test_isolated.py: test_the_process_dies_with_its_parent,"
        " test_twenty_kills_at_random_moments"
    ),
    "kept prefixes of another model are used": (
        "unit/test_session.py: test_another_package_is_refused, test_a_session_that_does_not_fit"
    ),
    "drafts change the text, or break grammars": (
        "unit/test_drafting.py: test_drafts_change_no_answer;"
        "unit/test_grammar.py: test_drafts_and_company_change_no_answer;"
        "backend/test_draft_equality.py: test_a_draft_model_has_the_same_tokens"
    ),
    "a JSON answer is stuck in white space": (
        "unit/test_grammar.py: test_answers_are_what_the_schema_describes;"
        "golden/test_smollm2_grammar.py: test_any_json_object_ends_or_is_cut_off"
    ),
    "what a prompt gets depends on its company": "unit/test_engine.py: test_batch_equals_single",
    "any web page can ask the local server": (
        "unit/test_server_guard.py: test_other_hosts_are_not, test_pages_of_others_may_not_ask"
    ),
    "frozen apps miss libraries": "unit/test_desktop_chat.py: test_the_window_survives_its_engine",
}


@pytest.mark.parametrize("pain", PAINS)
def test_it_has_tests(pain: str) -> None:
    for part in PAINS[pain].split(";"):
        file, _, names = part.partition(":")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {name.strip() for name in names.split(",") if name.strip()} <= known
