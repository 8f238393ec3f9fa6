"""How results reach people: tables (Markdown, LaTeX, CSV, terminal), figures (PNG, SVG, PDF) and progress displays."""
