"use strict";
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const code = document.getElementById(button.dataset.copy);
    let word = "Copied";
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      word = "Selected";
    }
    button.textContent = word;
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
}
const unfold = () => {
  let node = null;
  try {
    node = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  } catch {
    return;
  }
  if (!node) return;
  for (let part = node; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  node.scrollIntoView();
};
addEventListener("hashchange", unfold);
if (location.hash) unfold();
