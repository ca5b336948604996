"""`preloadctl`: one more client of ranks and of systemd, that shows and steers."""
