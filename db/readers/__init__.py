"""Result files of other tools than asv, a reader each; all give the same records."""
