"""The laws the engine rests on, and the tests that try to break each."""

from tests.known_bugs import KERNELS, STEP

LAWS = {
    "a": (  # the tree is the best set: prefix-closed, in order, better with each node
        "tests/test_tree_properties.py::test_trees_from_real_log_probs_hold_the_heaviest_prefixes",
        "tests/test_draft_tree.py::test_every_tree_from_logits_keeps_the_laws",
    ),
    "b": (  # a tree that is a chain is the linear draft
        f"{STEP}::test_a_tree_that_is_a_chain_is_verified_to_the_bit_like_the_linear_draft",
    ),
    "c": (  # any drafter gives the target's text, a perfect one whole blocks
        "tests/test_lossless.py::test_greedy_output_is_the_targets_own",
        "tests/test_lossless.py::test_a_perfect_drafter_always_commits_the_whole_block",
    ),
    "d": (  # the order of siblings does not matter
        "tests/test_tree_properties.py::test_the_order_of_nodes_changes_neither_mask_nor_outcome",
        f"{STEP}::test_the_order_of_siblings_changes_nothing_the_target_says",
    ),
    "e": (  # committed rows are those of a run from the start
        "tests/test_tree_scratch.py::test_decoding_after_a_commit_finds_the_rows_of_a_run_from_the_start",
        "tests/test_decoder.py::test_committed_state_equals_recomputation_from_scratch",
    ),
    "f": (  # samples come as often as the target alone gives them, and with its noise
        "tests/test_sampling_exactness.py::test_pairs_that_trees_emit_come_as_often_as_plain_decoding_says",
        "tests/test_lossless.py::test_sampled_output_is_the_targets_own_with_the_same_noise",
    ),
    "g": (  # a context grown step by step is one made at once
        "tests/test_drafter_context.py::test_a_context_grown_in_pieces_equals_one_made_at_once",
        "tests/test_drafter_twin.py::test_drafts_of_200_random_commits_equal_the_twins",
    ),
    "h": (  # every tree size, every offset in a page and a tile, over the limits of words
        f"{STEP}::test_a_node_is_judged_alike_in_a_tree_of_every_size",
        f"{KERNELS}::test_every_tree_size_at_every_offset_agrees_with_the_reference",
        "tests/test_decoder.py::test_a_step_from_every_offset_within_a_page_commits_the_right_rows",
        "tests/test_tree_properties.py::test_masks_of_every_tree_size_are_the_closure_of_the_parents",
    ),
    "i": (  # a graph reads its buffers anew at every replay
        f"{KERNELS}::test_a_captured_call_follows_what_its_buffers_hold",
    ),
}
