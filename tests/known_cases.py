"""Cases that other projects test their trees and drafters with, and where each is tried here."""

from tests.known_bugs import STEP

TREE = "tests/test_draft_tree.py"
WALK = "tests/test_tree_walk.py"
CACHE = "tests/test_kv_cache.py"
DRAFTS = "tests/test_drafter_twin.py"

CASES = {
    "nntrainer, README of DDTree": (f"{TREE}::test_the_nntrainer_example_chooses_a_d_g_b_d",),
    "nntrainer, unittest_ddtree.cpp": (
        f"{TREE}::test_nothing_to_choose_leaves_the_root_alone",
        f"{TREE}::test_the_nntrainer_logits_start_with_token_zero",
        "tests/test_verify.py::test_the_nntrainer_tree_starts_at_the_committed_length_and_counts_by_depth",
        "tests/test_drafter_context.py::test_every_element_of_the_mask_is_that_of_the_definition",
        f"{WALK}::test_a_chain_is_walked_up_to_the_first_disagreement",
        f"{CACHE}::test_a_commit_moves_the_accepted_rows_of_every_layer",  # keeps 0, 2 and 3
        f"{CACHE}::test_a_path_that_does_not_ascend_within_the_tree_changes_nothing",  # 2 and 0
        "tests/test_sampling.py::test_greedy_takes_the_lowest_id_among_equals",
        f"{TREE}::test_float32_rounding_of_log_probs_decides_ties_when_the_budget_exceeds_the_vocabulary",
    ),
    "vllm-ddtree, t1: three requests": (  # the case of that name
        "tests/test_tree_attention.py::test_backend_agrees_with_the_reference",
    ),
    "vllm-ddtree, t4: twelve trees": (
        "tests/test_tree_properties.py::test_the_twelve_trees_of_vllm_ddtree_come_in_the_published_order",
    ),
    "vllm-ddtree, t5: compaction": (
        f"{CACHE}::test_a_commit_moves_the_accepted_rows_of_every_layer",
        f"{CACHE}::test_sequences_of_a_batch_commit_their_own_paths",
        f"{CACHE}::test_a_long_accepted_path_moves_alike_in_64_layers",
    ),
    "vllm-ddtree, t6: a random drafter": (
        "tests/test_lossless.py::test_greedy_output_is_the_targets_own",
        "tests/test_lossless_pair.py::test_output_is_that_of_autoregressive_decoding",
    ),
    "vllm-ddtree, t20: the context of every node": (
        f"{STEP}::test_every_node_of_three_steps_is_judged_on_its_own_path",
        f"{STEP}::test_unequal_trees_of_a_batch_are_masked_by_their_own_rows",
    ),
    "vllm-ddtree: a mask that is the causal one": (
        "tests/test_modes.py::test_a_chain_as_a_tree_is_bit_for_bit_the_linear_pass",
        f"{STEP}::test_a_tree_that_is_a_chain_is_verified_to_the_bit_like_the_linear_draft",
    ),
    "aphrodite, test_ddtree.py": (f"{WALK}::test_the_aphrodite_example_commits_one_draft_token",),
    "dflash-caddtree-integrations, test_ddtree.py": (
        f"{TREE}::test_golden_trees_come_out_exactly",
        f"{TREE}::test_a_width_of_one_gives_a_chain",
    ),
    "vLLM, docstring of ddtree.py": (
        f"{TREE}::test_the_vllm_example_puts_sat_below_cat_and_dog",
        f"{WALK}::test_the_vllm_example_tells_the_two_sats_apart",
    ),
    "SpecForge, test_dflash_mask.py": (
        "tests/test_drafter_context.py::test_every_element_of_the_mask_is_that_of_the_definition",
        f"{DRAFTS}::test_drafts_at_the_edges_of_window_and_ring_equal_the_twins",
    ),
    "vllm-ascend, the amplitude of Kimi's drafter": (
        "tests/test_drafter_config.py::test_a_drafters_amplitude_is_what_its_checkpoint_says_or_that_of_serving_stacks",
        "tests/test_drafter.py::test_the_kimi_drafters_rotary_tables_are_the_published_ones",
    ),
    "hipfire, select_main_path": (  # the first child of a node is its likeliest
        "tests/test_tree_properties.py::test_large_vocabularies_give_the_best_set_with_the_lowest_ids_of_equals",
        "tests/test_chain_tree.py::test_a_chain_takes_the_likeliest_token_of_each_depth",
    ),
}
