// The page of a running run is written anew. It is not taken away from a reader who searches, selects, opened
// something, looks at an earlier step or types.
const seconds = Number(document.documentElement.dataset.live);
if (seconds) {
  const made = document.querySelector("[data-made]"), age = (Date.now() / 1000 - made.dataset.made) / 60;
  made.textContent = age < 1.5 ? "Updated just now." : `Updated ${Math.round(age)} minutes ago.`;
  setInterval(() => {
    const busy = search?.value || all?.checked || (range && range.value !== range.defaultValue)
      || !getSelection().isCollapsed || document.querySelector("details:not(.step)[open]")
      || [from, to].some((input) => input.value !== String(view[input.name] ?? ""));
    if (!document.hidden && !busy) location.reload();
  }, 1000 * seconds);
}
