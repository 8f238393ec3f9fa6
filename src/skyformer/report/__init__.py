"""The output of results: tables (Markdown, LaTeX, CSV, terminal), figures (PNG, SVG, PDF) and progress displays."""
