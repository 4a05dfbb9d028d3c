"""Real execution: worlds in which models run. Import as `minedraft.backends`, never as bare `backends`."""
