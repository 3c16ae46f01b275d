"""What `import moemesh as mm` offers beside classes and functions of other packages."""
