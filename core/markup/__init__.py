"""Parts of pages as texts of HTML: escaped tables, charts that fit any width, colours. May import the ground floor."""
