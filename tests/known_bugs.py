"""Failures that engines of this kind were shipped with, and what keeps each out of this one.

A row names the tests that reproduce its cause here, or says why the cause cannot occur.
"""

from dataclasses import dataclass

STEP = "tests/test_known_bugs.py"
DRAFTER = "tests/test_known_bugs_drafter.py"
KERNELS = "tests/test_known_bugs_kernels.py"


@dataclass(frozen=True)
class Bug:
    number: int
    symptom: str
    cause: str
    source: str
    tests: tuple[str, ...] = ()
    impossible: str = ""


BUGS = (
    Bug(
        1,
        "drafts are accepted in eager mode and rejected under a CUDA graph",
        "positions by depth were built outside the graph's buffers",
        "rmagur1203/vllm-ddtree docs/DDTREE-FINDINGS-EN.md",
        (
            f"{KERNELS}::test_a_captured_call_follows_what_its_buffers_hold",
            f"{STEP}::test_positions_follow_what_was_committed_and_not_what_was_proposed",
        ),
    ),
    Bug(
        2,
        "positions are too large by 4 to 10",
        "they came from an optimistic mirror of the computed tokens",
        "rmagur1203/vllm-ddtree docs/DDTREE-FINDINGS-EN.md",
        (f"{STEP}::test_positions_follow_what_was_committed_and_not_what_was_proposed",),
    ),
    Bug(
        3,
        "requests behind the first have wrong mask rows",
        "offsets of a packed mask were counted in another unit",
        "rmagur1203/vllm-ddtree docs/DDTREE-FINDINGS-EN.md",
        (
            f"{STEP}::test_unequal_trees_of_a_batch_are_masked_by_their_own_rows",
            "tests/test_mla.py::test_sequences_of_uneven_length_and_tree_size_do_not_mix",
        ),
    ),
    Bug(
        4,
        "KV rows are damaged now and then after long accepts",
        "a parallel compaction overwrote rows it had still to read",
        "rmagur1203/vllm-ddtree docs/DDTREE-FINDINGS-EN.md",
        (
            "tests/test_kv_cache.py::test_a_commit_moves_the_accepted_rows_of_every_layer",
            "tests/test_kv_cache.py::test_a_long_accepted_path_moves_alike_in_64_layers",
            "tests/test_tree_scratch.py::test_every_accepted_path_of_a_tree_is_walked_and_committed",
        ),
    ),
    Bug(
        5,
        "wrong tokens where a tree was dropped or too large",
        "the walk used a tree that had never been masked",
        "rmagur1203/vllm-ddtree docs/DDTREE-FINDINGS-EN.md",
        (
            f"{STEP}::test_the_largest_tree_is_masked_and_walked_as_the_tree_it_is",
            f"{STEP}::test_a_tree_larger_than_its_scratch_is_refused_before_a_row_is_written",
            "tests/test_tree_attention.py::test_operands_that_do_not_fit_are_refused_by_name",
        ),
    ),
    Bug(
        6,
        "acceptance length 1.46 instead of 6.34",
        "the mask's embedding stood in slot 0 of the block too",
        "hipfire pull request 483",
        (
            f"{DRAFTER}::test_the_mask_stands_in_every_slot_but_the_first",
            "tests/test_drafter_twin.py::test_drafts_of_200_random_commits_equal_the_twins",
        ),
    ),
    Bug(
        7,
        "sampling is biased at a temperature",
        "min(1, p / q) was applied to drafts that were not drawn from q",
        "hipfire pull request 483",
        (
            "tests/test_sampling_exactness.py::test_pairs_that_trees_emit_come_as_often_as_plain_decoding_says",
        ),
    ),
    Bug(
        8,
        "few drafts are accepted, no error",
        "taps were taken one layer off",
        "vllm-project/vllm 42704",
        (
            "tests/test_decoder.py::test_taps_are_the_residual_stream_after_their_layer",
            "tests/test_drafter_twin.py::test_tap_i_is_the_transformers_librarys_hidden_state_i_plus_1",
        ),
    ),
    Bug(
        9,
        "no draft is accepted",
        "the drafter's head was not the target's, or padded to another vocabulary",
        "vllm-project/vllm 46435; local-inference-lab/vllm 54",
        (
            f"{DRAFTER}::test_a_drafter_speaks_through_its_targets_head",
            f"{DRAFTER}::test_a_drafter_that_brings_a_head_of_its_own_is_refused",
            f"{DRAFTER}::test_a_drafter_with_a_padded_vocabulary_is_refused",
        ),
    ),
    Bug(
        10,
        "acceptance length 5.27 instead of 5.62",
        "sliding layers were causal inside the block by default",
        "sgl-project/sglang 34524",
        (
            "tests/test_drafter_config.py::test_causality_is_read_where_checkpoints_say_it",
            "tests/test_drafter_twin.py::test_drafts_at_the_edges_of_window_and_ring_equal_the_twins",
        ),
    ),
    Bug(
        11,
        "acceptance length 1.42 instead of 6.30",
        "the target's row of the mask is near zero; the checkpoint brings its own",
        "sgl-project/sglang 27924; vllm-project/vllm 46104",
        (
            "tests/test_drafter_twin.py::test_a_mask_embedding_of_the_checkpoints_own_takes_the_place_of_the_targets",
            "tests/test_mask_embedding.py::test_a_mask_embedding_beside_the_tensors_is_read_and_saved",
        ),
    ),
    Bug(
        12,
        "few drafts are accepted on Kimi",
        "the amplitude of YaRN was 1.0, not 1.4159",
        "vllm-project/vllm-ascend _normalize_kimi_dflash_rope",
        (
            "tests/test_drafter_config.py::test_a_drafters_amplitude_is_what_its_checkpoint_says_or_that_of_serving_stacks",
            "tests/test_drafter_twin.py::test_the_amplitude_of_cos_and_sin_reaches_the_scores",
        ),
    ),
    Bug(
        13,
        "0.06 % of the drafts are accepted",
        "a quantisation had rotated the target's hidden states",
        "vllm-project/vllm-ascend 12886",
        (
            f"{DRAFTER}::test_weights_that_were_rotated_are_refused",
            "tests/test_checkpoint_config.py::test_a_storage_the_engine_does_not_implement_is_refused",
        ),
    ),
    Bug(
        14,
        "shapes of hidden states and cache rows differ",
        "prompts and decoding requests shared a batch",
        "sgl-project/sglang 26476",
        (
            f"{DRAFTER}::test_prompts_and_single_rows_extend_one_context_together",
            f"{DRAFTER}::test_a_prompt_that_comes_between_the_steps_of_others_disturbs_nobody",
        ),
    ),
    Bug(
        15,
        "crash with a prefix cache",
        "the drafter's rows of the cached prefix did not exist",
        "sgl-project/sglang 28528",
        (f"{DRAFTER}::test_a_prefix_that_is_reused_brings_its_drafter_rows",),
    ),
    Bug(
        16,
        "crash on a target of MLA alone, or where its cache is fp8",
        "target and drafter shared the dtype of their KV rows",
        "sgl-project/sglang 29218",
        (f"{DRAFTER}::test_drafter_rows_are_no_rows_of_the_targets_cache",),
    ),
    Bug(
        17,
        "crash where prompts are processed on other machines",
        "the drafting state was not handed over",
        "sgl-project/sglang 36140",
        impossible="one Engine prefills and steps: its StepBatch holds context and pending taps "
        "from the first chunk on, and there is no way to build one from a cache alone",
    ),
    Bug(
        18,
        "drafting makes decoding slower at 185k",
        "the drafter scanned its whole context",
        "vllm-project/vllm 54691; club-3090 1096",
        (
            f"{DRAFTER}::test_a_drafter_scans_and_holds_no_more_than_it_may_see",
            f"{DRAFTER}::test_the_engines_knob_bounds_what_the_drafter_scans",
        ),
    ),
    Bug(
        19,
        "illegal access from 512k on",
        "an index overflowed 32 bits",
        "vllm-project/vllm 55279",
        (
            f"{KERNELS}::test_rows_beyond_two_to_the_31_elements_are_found",
            f"{STEP}::test_slots_beyond_32_bits_are_counted_in_full",
        ),
    ),
    Bug(
        20,
        "page 0 is overwritten",
        "unused table entries were taken for page 0",
        "local-inference-lab/vllm 24",
        (
            f"{STEP}::test_pages_of_no_sequence_are_neither_written_nor_read",
            "tests/test_drafter_context.py::test_a_draft_leaves_every_context_row_as_it_was",
        ),
    ),
    Bug(
        21,
        "sliding layers turn causal; placeholders are looked up as tokens",
        "a default of the builder of metadata",
        "local-inference-lab/vllm 86",
        (
            "tests/test_drafter_context.py::test_the_layers_of_a_drafter_see_what_their_types_say",
            "tests/test_engine_config.py::test_an_impossible_drafter_is_refused",
            f"{STEP}::test_pages_of_no_sequence_are_neither_written_nor_read",
        ),
    ),
    Bug(
        22,
        "a launch fails: 102400 bytes of shared memory, 101376 there are",
        "stages chosen for larger architectures",
        "local-inference-lab/vllm 11",
        ("tests/test_kernel_compilation.py::test_a_kernel_fits_the_machine",),
    ),
    Bug(
        23,
        "endless repetition at budgets 36, 56 and 64",
        "a product was wrong for some numbers of rows",
        "Luce-Org/lucebox 61",
        (
            f"{STEP}::test_a_node_is_judged_alike_in_a_tree_of_every_size",
            f"{KERNELS}::test_every_tree_size_at_every_offset_agrees_with_the_reference",
        ),
    ),
    Bug(
        24,
        "text of tool calls is damaged",
        "trees were verified with windowed attention",
        "Luce-Org/lucebox 327",
        impossible="targets are MLA models, whose layers have no window: a row sees all committed "
        "rows, and the drafter's windows never reach the target",
    ),
    Bug(
        25,
        "mask rows behind the first are zero",
        "the stride of the mask was another one",
        "Luce-Org/lucebox 346",
        (
            "tests/test_tree_attention.py::test_backend_agrees_with_the_reference",
            f"{STEP}::test_unequal_trees_of_a_batch_are_masked_by_their_own_rows",
        ),
    ),
    Bug(
        26,
        "argmax gives -1",
        "the row was empty or NaN",
        "Luce-Org/lucebox 301",
        (
            f"{STEP}::test_a_target_that_gives_nan_is_refused_and_no_token_is_made_up",
            "tests/test_sampling.py::test_rows_without_a_distribution_are_refused",
        ),
    ),
    Bug(
        27,
        "acceptance collapses with 16 sequences",
        "state of sequences was mixed up",
        "ggml-org/llama.cpp 27117 and 25792",
        (f"{STEP}::test_sixteen_sequences_of_a_batch_keep_their_own_state",),
    ),
    Bug(
        28,
        "greedy output changes with a drafter",
        "numbers depend on the shape of the batch, or a bug",
        "ggml-org/llama.cpp 27975; Pushkinist/rMLX 513",
        (
            "tests/test_lossless.py::test_greedy_output_is_the_targets_own",
            "tests/test_lossless.py::test_a_text_does_not_depend_on_the_batch_it_is_in",
        ),
    ),
    Bug(
        29,
        "output loses tokens",
        "a last filter removed every id that equals the mask's",
        "z-lab/dflash 7d2ea1e",
        (f"{STEP}::test_the_masks_id_and_token_0_are_tokens_like_any_other",),
    ),
    Bug(
        30,
        "the temperature is ignored in drafts, or judged on other logits",
        "draft and target sampled differently",
        "z-lab/dflash 74, 57 and 152",
        (
            f"{STEP}::test_a_temperature_leaves_the_trees_alone_and_rules_what_is_said",
            f"{STEP}::test_a_quantised_target_says_in_trees_what_it_says_alone",
            "tests/test_lossless.py::test_sampled_output_is_the_targets_own_with_the_same_noise",
        ),
    ),
    Bug(
        31,
        "rows of a sliding layer see too much",
        "the window was cut once for the block, not for each row",
        "kimwin2/ddtree_eagle3_patch; wejoncy/sfllm 35",
        (
            "tests/test_drafter_context.py::test_every_element_of_the_mask_is_that_of_the_definition",
            "tests/test_drafter_twin.py::test_drafts_at_the_edges_of_window_and_ring_equal_the_twins",
        ),
    ),
    Bug(
        32,
        "a cache is compacted twice",
        "layers were views of one cache",
        "kimwin2/ddtree_eagle3_patch",
        (f"{STEP}::test_no_two_layers_share_a_row",),
    ),
    Bug(
        33,
        "long prompts are damaged",
        "a kernel that wrote the drafter's rows of several layers at once",
        "sgl-project/sglang 27638",
        (f"{DRAFTER}::test_a_long_prompt_gives_the_same_draft_whatever_its_chunks",),
    ),
    Bug(
        34,
        "verifying a small tree differs from decoding",
        "two kernels split the context differently",
        "sparkinfer 712",
        (
            f"{STEP}::test_a_node_is_judged_alike_in_a_tree_of_every_size",
            f"{STEP}::test_a_tree_that_is_a_chain_is_verified_to_the_bit_like_the_linear_draft",
            "tests/test_tree_attention.py::test_number_of_splits_does_not_change_the_result",
        ),
    ),
    Bug(
        35,
        "the size of a tree is wrong",
        "token id 0 was counted as padding",
        "sgl-project/sglang 27509",
        (f"{STEP}::test_the_masks_id_and_token_0_are_tokens_like_any_other",),
    ),
    Bug(
        36,
        "recurrent targets are wrong after a partial accept",
        "their state was not rolled back",
        "sgl-project/sglang 31850 and 37817; vllm-project/vllm 54928 and 51812",
        impossible="no layer is recurrent: all state of a sequence is rows by position, and "
        "checkpoints of other model types are refused when they are loaded",
    ),
    Bug(
        37,
        "the drafter's cache is as large as the context",
        "the window did not enter the size of its pool",
        "beellama 97",
        (
            f"{DRAFTER}::test_a_drafter_scans_and_holds_no_more_than_it_may_see",
            "tests/test_drafter_context.py::test_the_rows_of_sliding_layers_do_not_grow_with_the_context",
        ),
    ),
    Bug(
        38,
        "rows are off by one",
        "positions in a batch and nodes count the root or do not",
        "patrickbdevaney/dflash-caddtree-integrations",
        (
            "tests/test_tree_walk.py::test_golden_walks_accept_exactly_the_published_nodes",
            "tests/test_decoder.py::test_rows_off_the_chain_are_compacted",
            f"{STEP}::test_unequal_trees_of_a_batch_are_masked_by_their_own_rows",
        ),
    ),
    Bug(
        39,
        "a drafter learns labels of the wrong positions, or moves tied weights",
        "mask and shift of the training loss",
        "sgl-project/SpecForge 473",
        (
            "tests/test_training_recipe.py::test_training_drafts_are_the_engines_at_every_anchor",
            "tests/test_training_recipe.py::test_the_training_pass_gives_the_engines_logits_and_taps",
        ),
    ),
)
