"""What results look like: tables, curves, and the paper's numbers to hold them against."""
