// Theme before the first paint, and moments in the reader's own time zone. Loads nothing, sends nothing.
(() => {
  const root = document.documentElement;
  const order = ["auto", "light", "dark"];
  const read = () => { try { return localStorage.getItem("moedraft-theme"); } catch { return null; } };
  const apply = (theme) => { root.dataset.theme = order.includes(theme) ? theme : "auto"; };
  apply(read());
  window.moedraftTheme = () => {
    const next = order[(order.indexOf(root.dataset.theme) + 1) % order.length];
    try { localStorage.setItem("moedraft-theme", next); } catch { /* private window */ }
    apply(next);
  };
  const write = (node) => {
    const at = new Date(node.getAttribute("datetime"));
    if (isNaN(at) || node.dataset.local === node.getAttribute("datetime")) return;
    node.dataset.local = node.getAttribute("datetime");
    const pad = (n) => String(n).padStart(2, "0");
    const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
    const clock = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
    node.title = node.textContent;
    node.textContent = day === new Date().toISOString().slice(0, 10) ? clock : `${day} ${clock}`;
  };
  const localise = () => document.querySelectorAll("time[datetime]").forEach(write);
  addEventListener("DOMContentLoaded", () => {
    localise();
    new MutationObserver(localise).observe(document.body, { childList: true, subtree: true });
  });
})();
