"""What is known of one sequence: tokens, text, statistics, results, and the records that pass between parts."""
