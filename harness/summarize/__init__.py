"""From rows and reports to the CSV files that the paper reads."""
