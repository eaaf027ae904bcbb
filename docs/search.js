// The site's search, for messages that are pasted whole: Sphinx finds a heading that contains what
// is typed, and pages that have every word of it. A message is longer than its heading in
// troubleshooting.md, and contains paths and numbers that no page has.
if (typeof Search !== "undefined") {
  const plain = (text) => text.toLowerCase().replace(/\s+/g, " ");
  const search = Search._performSearch;

  // How many characters of a heading stand in the message, in their order; 0 if any does not.
  const matching = (heading, message) => {
    let place = 0;
    let count = 0;
    for (const part of plain(heading).split(/<[^<>]*>|\.\.\./)) {
      place = message.indexOf(part.trim(), place);
      if (place < 0) return 0;
      place += part.trim().length;
      count += part.trim().length;
    }
    return count;
  };

  Search._performSearch = (query, ...terms) => {
    const index = Search._index;
    const page = index.docnames.indexOf("troubleshooting");
    const found = Object.entries(index.alltitles).flatMap(([title, places]) =>
      places
        .filter(([file, id]) => file === page && id)
        .map(([file, id]) => [
          index.docnames[file],
          `${index.titles[file]} > ${title}`,
          "#" + id,
          null,
          matching(title, plain(query)),
          index.filenames[file],
          SearchResultKind.title,
        ]),
    );
    const entries = found.filter((each) => each[4] > 9).sort((a, b) => a[4] - b[4]);
    return [...search(query, ...terms), ...entries]; // the last is shown first
  };
}
